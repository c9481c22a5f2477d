"""`offbeat doctor` and `fsck`: what works on this machine, and what is whole in a run directory."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.errors import suggest_nearest
from offbeat.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.preflight.doctor import Finding


def doctor(
    engine: Annotated[bool, typer.Option("--engine", help="Also start vLLM and test it; takes half a minute")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Try out what a run on a GPU needs; five minutes at most")] = False,
    device: Annotated[
        Literal["cuda", "cpu"] | None, typer.Option(help="With --gpu: cpu runs the same parts without a GPU")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run one check, for example sandbox; can be repeated")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write a report to attach to an issue")] = None,
) -> None:
    """Check versions, extras, engines, sandbox and Ray, and show how to fix problems: `offbeat doctor --engine`.

    For an issue: `offbeat doctor --json doctor.json`. Before a run on a GPU: `offbeat doctor --gpu`. A single check:
    `offbeat doctor --only sandbox`, or of `--gpu` machine, flex, training or sleep.
    """
    if gpu:
        _doctor_gpu(device, json, only or [])
        return
    if device:
        typer.echo("--device belongs to --gpu: offbeat doctor --gpu --device cpu", err=True)
        raise typer.Exit(2)
    from offbeat.preflight.doctor import CHECKS, FindingState, diagnose

    _require_names(only or [], CHECKS)
    findings = []
    with Working("checking", after=SOON) as working:
        for finding in diagnose(engine=engine, only=only or []):
            working.say(printable(str(finding)))
            findings.append(finding)
    states = [finding.state for finding in findings]
    broken, missing = states.count(FindingState.BROKEN), states.count(FindingState.MISSING)
    typer.echo(f"{broken} broken, {missing} missing; missing parts are needed only for the features they name")
    if json is not None:
        _write_report(json, findings)
    if broken:
        raise typer.Exit(1)


def _require_names(only: Sequence[str], names: Collection[str]) -> None:
    for name in only:
        if name not in names:
            raise typer.BadParameter(f"--only {name!r} is not a check; {suggest_nearest(name, names)}")


def _write_report(path: Path, findings: "list[Finding]") -> None:
    """Write what an issue needs: versions, the machine and every finding, without paths of this user."""
    from json import dumps

    from offbeat.preflight.doctor import without_paths
    from offbeat.run.directory import environment
    from offbeat.storage.files import write_atomically

    report = {"machine": environment(), "checks": [finding.to_json() for finding in findings]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, without_paths(dumps(report, indent=1, ensure_ascii=False)).encode() + b"\n", durable=False)
    typer.echo(f"report: {path}")


def _doctor_gpu(device: str | None, report: Path | None, only: Sequence[str]) -> None:
    from offbeat.imports import install_command, missing_modules
    from offbeat.preflight.doctor import FindingState

    if missing := missing_modules(["torch", "transformers", "lance"]):
        typer.echo(f"--gpu needs {', '.join(missing)}: {install_command('train')}", err=True)
        raise typer.Exit(2)
    if device == "cpu":
        # Before torch is imported: engines and trainer choose a GPU if they see one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from offbeat.placement.hardware import Hardware
    from offbeat.preflight.gpu_session import PARTS, DoctorSession

    _require_names(only, PARTS)
    if device != "cpu" and Hardware.detect() is None:
        typer.echo(
            "torch finds no GPU here; check `nvidia-smi`, and that torch is a CUDA build. To run the same parts "
            "without a GPU: offbeat doctor --gpu --device cpu",
            err=True,
        )
        raise typer.Exit(2)
    session = DoctorSession(device or "cuda", only or tuple(PARTS))
    with Working("checking", after=SOON) as working:
        for finding in session.run():
            working.say(printable(str(finding)))
    states = [finding.state for finding in session.findings]
    seconds = sum(finding.seconds for finding in session.findings)
    counts = ", ".join(
        f"{states.count(one)} {one.lower()}" for one in (FindingState.OK, FindingState.BROKEN, FindingState.SKIPPED)
    )
    typer.echo(f"{counts}; {seconds:.0f} s")
    if session.device == "cuda" and not only:  # a run asks for all parts
        session.keep()
    if report is not None:
        session.write(report)
        typer.echo(f"report: {report}")
    if not session.passed:
        raise typer.Exit(1)


def fsck(run: Annotated[Path, typer.Argument(help="A run directory")]) -> None:
    """Read everything in a run directory and say what is whole: `offbeat fsck runs/one`.

    Reads both logs, every checkpoint, the record and the ledger, one line each, and changes nothing. The exit code is 0
    if all of it is whole, 1 if something is damaged, 2 if there is no run. A damaged part says whether the next resume
    repairs it or what you can do.
    """
    from offbeat.run.directory import RunDirectory

    directory, damaged = RunDirectory(run), False
    with plain_errors(code=2):
        directory.require_run()
        from offbeat.run.fsck import check_run  # takes seconds

        for found in check_run(directory):
            typer.echo(printable(str(found)))
            damaged |= found.remedy is not None
    raise typer.Exit(int(damaged))
