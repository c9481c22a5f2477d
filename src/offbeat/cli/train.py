"""`offbeat train` and `offbeat resume`."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.check import Settings, checked
from offbeat.cli.terminal import plain_errors

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.run.directory import RunDirectory
    from offbeat.run.loop import Loop


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file")],
    out: Annotated[Path | None, typer.Option(help="The run directory; runs/<name of the file> unless given")] = None,
    settings: Settings = None,
) -> None:
    """Train: `offbeat train run.toml --set sync.every=10`. Ctrl-C ends after the step, with a checkpoint."""
    from offbeat.run.directory import RunDirectory

    parsed = checked(config, settings)
    directory = RunDirectory(out or Path("runs") / config.stem)
    with plain_errors(code=2):
        directory.create(parsed)
    typer.echo(parsed.plan)
    drive(parsed, directory)


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    steps: Annotated[int, typer.Option(min=0, help="Go on to this many steps; 0: as the run was told")] = 0,
) -> None:
    """Go on from the last checkpoint: `offbeat resume runs/one`."""
    from offbeat.run.directory import RunDirectory, RunLock

    directory = RunDirectory(run)
    with plain_errors(code=2):
        config = directory.config()
        with RunLock(directory):  # said before anything heavy is imported
            pass
    drive(config.model_copy(update={"steps": steps}) if steps else config, directory)


def drive(config: "Config", directory: "RunDirectory") -> None:
    """Run to the end with the live view; the first Ctrl-C ends after the step, the second at once."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from offbeat.report.live import LiveView

    if config.run.place == "ray":
        from offbeat.run.ray.entry import train as run
    else:
        from offbeat.run.local import train as run

    disable_progress_bar()  # the view has its own
    asked: list[Loop] = []

    def stop(number: int, frame: object) -> None:
        typer.echo("ending after this step, with a checkpoint; once more to end at once", err=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for loop in asked:
            loop.stop("interrupted")

    signal.signal(signal.SIGINT, stop)
    with LiveView(config, Console()) as view, plain_errors(f"go on with `offbeat resume {directory.path}`"):
        ledger = run(config, directory, watching=view, started=asked.append)
    typer.echo(str(ledger))
    done = not asked or asked[-1].learner.step >= config.steps
    typer.echo(f"the run is in {directory.path}" + ("" if done else f"; go on with `offbeat resume {directory.path}`"))
