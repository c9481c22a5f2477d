"""`offbeat quickstart`: train a tiny model and write its report, without data, account or GPU."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.init import annotated, recipes
from offbeat.cli.terminal import printable
from offbeat.reports.working import Working

if TYPE_CHECKING:
    from offbeat.run.directory import RunDirectory


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory for model, run and report")] = Path("runs/quickstart"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: as in the recipe")] = None,
) -> None:
    """Make a tiny model, train it off-policy and write a report: `offbeat quickstart`.

    Takes about three minutes on two CPU cores.
    """
    typer.echo("a tiny model learns one-digit sums off-policy, in about three minutes on two CPU cores")
    from offbeat.cli.train import drive
    from offbeat.config.parsing import load
    from offbeat.errors import RunError
    from offbeat.run.directory import RunDirectory

    directory = RunDirectory(out / "run")
    file = _write_configuration(out)
    config = load(file, [f"steps={steps}"] if steps else [])
    try:
        lock = directory.create(config)
    except RunError as error:
        typer.echo(printable(f"{error} with --out"), err=True)
        raise typer.Exit(2) from error
    typer.echo("1. a model: 0.1 M parameters, pre-trained on one-digit sums; six in ten have the same mistake")
    _make_model(out / "model")
    typer.echo(f"2. off-policy training: {config.plan}")
    drive(config, directory, lock)
    typer.echo(f"3. {_result(directory)}")
    _report(directory, out / "report.html")
    typer.echo(
        f"\nlook at the answers    offbeat view {directory.path}\n"
        f"understand a metric    offbeat explain drift_tv_token\n"
        f"train on-policy        offbeat train {file} --set sync.every=1 --out {out / 'fresh'}\n"
        "other recipes          offbeat init"
    )


def _make_model(directory: Path) -> None:
    from offbeat.imports import paused_collector

    with Working("   loading torch") as working:
        with paused_collector():
            from offbeat.run.quickstart import make_model

        working.next("   pre-training")
        make_model(directory, say=lambda line: working.say(f"   {line}"))


def _write_configuration(out: Path) -> Path:
    """Write the recipe with the path of the model."""
    out.mkdir(parents=True, exist_ok=True)
    recipe = re.sub(r'^path = ".*"$', f"path = '{out / 'model'}'", recipes()["quickstart"], flags=re.MULTILINE)
    file = out / "quickstart.toml"
    file.write_text(annotated(recipe), encoding="utf-8")
    return file


def _result(directory: "RunDirectory") -> str:
    from offbeat.evaluation.table import GREEDY
    from offbeat.events import EventKind
    from offbeat.run.journal import read

    events = list(read(directory.events))
    evaluated = [event for event in events if event["kind"] == EventKind.EVALUATED]
    published = sum(event["kind"] == EventKind.PUBLISHED for event in events) - 1
    if len(evaluated) < 2:
        return f"too few steps to measure learning, {published} publishes"
    changes = [
        " -> ".join(f"{cast('list[float]', event[name])[0]:.2f}" for event in (evaluated[0], evaluated[-1]))
        for name in ("pass@1", GREEDY)
    ]
    return f"pass rate {changes[0]}, of the most probable answers {changes[1]}, with {published} publishes"


def _report(directory: "RunDirectory", out: Path) -> None:
    """Write the report if jinja2 is installed."""
    from offbeat.imports import install_command, missing_modules

    if missing := missing_modules(["jinja2"]):
        typer.echo(f"   no report: {missing[0]} is not installed; install it with: {install_command('report')}")
        return
    with Working("   writing the report"):
        from offbeat.reports.page import write_report

        write_report([directory.path], out)
    typer.echo(f"   report: {out}")
