"""`offbeat doctor`: what works on this machine, what does not, and the command that fixes it."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.cli.terminal import printable


def doctor(
    engine: Annotated[bool, typer.Option("--engine", help="Also start vLLM and test it; takes half a minute")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Try out all that a run on a GPU needs; takes minutes")] = False,
    device: Annotated[
        Literal["cuda", "cpu"] | None, typer.Option(help="With --gpu: cpu runs the same checks without a GPU")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="With --gpu: write a report to attach to an issue")] = None,
) -> None:
    """Check versions, extras, engines, sandbox and Ray, and show how to fix problems: `offbeat doctor --engine`.

    Before a run on a GPU: `offbeat doctor --gpu --json gpu.json`.
    """
    if gpu:
        _doctor_gpu(device, json)
        return
    if device or json:
        typer.echo("--device and --json belong to --gpu: offbeat doctor --gpu --json gpu.json", err=True)
        raise typer.Exit(2)
    from offbeat.preflight.doctor import FindingState, diagnose

    broken = missing = 0
    for finding in diagnose(engine=engine):
        typer.echo(printable(str(finding)))
        broken += finding.state is FindingState.BROKEN
        missing += finding.state is FindingState.MISSING
    typer.echo(f"{broken} broken, {missing} missing; missing parts are needed only for the features they name")
    if broken:
        raise typer.Exit(1)


def _doctor_gpu(device: str | None, report: Path | None) -> None:
    from offbeat.imports import install_command, missing_modules
    from offbeat.preflight.doctor import FindingState

    if missing := missing_modules(["torch", "transformers", "lance"]):
        typer.echo(f"--gpu needs {', '.join(missing)}: {install_command('train')}", err=True)
        raise typer.Exit(2)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # before torch is imported: engines and trainer choose a GPU if they see one
        )
    from offbeat.placement.hardware import Hardware
    from offbeat.preflight.gpu.session import DoctorSession

    if device != "cpu" and Hardware.detect() is None:
        typer.echo(
            "torch finds no GPU here; check `nvidia-smi`, and that torch is a CUDA build. To run the same checks "
            "without a GPU: offbeat doctor --gpu --device cpu",
            err=True,
        )
        raise typer.Exit(2)
    session = DoctorSession(device or "cuda")
    for finding in session.run():
        typer.echo(printable(str(finding)))
    states = [finding.state for finding in session.findings]
    seconds = sum(finding.seconds for finding in session.findings)
    counts = ", ".join(
        f"{states.count(one)} {one.lower()}" for one in (FindingState.OK, FindingState.BROKEN, FindingState.SKIPPED)
    )
    typer.echo(f"{counts}; {seconds:.0f} s")
    if session.device == "cuda":
        session.keep()
    if report is not None:
        session.write(report)
        typer.echo(f"report: {report}")
    if not session.passed:
        raise typer.Exit(1)
