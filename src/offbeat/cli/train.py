"""`offbeat train` and `offbeat resume`: run the training loop with the live view."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.check import Settings, checked
from offbeat.cli.terminal import plain_errors

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.run.directory import RunDirectory


def train(
    config: Annotated[Path, typer.Argument(help="The TOML file of the run")],
    out: Annotated[Path | None, typer.Option(help="The run directory; default: runs/<name of the file>")] = None,
    settings: Settings = None,
) -> None:
    """Train a model: `offbeat train run.toml --set sync.every=10`. Ctrl-C stops after the step, with a checkpoint."""
    from offbeat.run.directory import RunDirectory

    parsed = checked(config, settings, to_run=True)
    directory = RunDirectory(out or Path("runs") / config.stem)
    with plain_errors(code=2):
        directory.create(parsed)
    typer.echo(parsed.plan)
    drive(parsed, directory)


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    steps: Annotated[int, typer.Option(min=0, help="Train until this step; 0: as configured")] = 0,
) -> None:
    """Resume a run from its last checkpoint: `offbeat resume runs/one`."""
    from offbeat.run.directory import RunDirectory, RunLock

    directory = RunDirectory(run)
    with plain_errors(code=2):
        config = directory.config()
        with RunLock(directory):  # fails before anything heavy is imported if the run is already running
            pass
    drive(config.model_copy(update={"steps": steps}) if steps else config, directory)


def drive(config: "Config", directory: "RunDirectory") -> None:
    """Run to the end with the live view, then print the ledger and where the run is."""
    from offbeat import api

    proceed = f"continue with `offbeat resume {directory.path}`"
    with plain_errors(proceed):
        ledger, done = api.drive(config, directory)
    typer.echo(str(ledger))
    typer.echo(f"the run is in {directory.path}" + ("" if done else f"; {proceed}"))
