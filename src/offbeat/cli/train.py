"""`offbeat train` and `offbeat resume`: run the training loop with the live view."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.check import Accept, Settings, checked
from offbeat.cli.terminal import plain_errors, stopped_by_ctrl_c

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.run.directory import RunDirectory, RunLock


def train(
    config: Annotated[Path, typer.Argument(help="The TOML file of the run")],
    out: Annotated[Path | None, typer.Option(help="The run directory; default: runs/<name of the file>")] = None,
    settings: Settings = None,
    accept: Accept = False,
) -> None:
    """Train a model: `offbeat train run.toml --set sync.every=10`. Ctrl-C stops after the step, with a checkpoint."""
    parsed = checked(config, [*(settings or []), *(["accept=true"] if accept else [])], to_run=True)
    from offbeat.run.directory import RunDirectory

    directory = RunDirectory(out or Path("runs") / config.stem)
    with stopped_by_ctrl_c(_proceed(directory)):
        with plain_errors(code=2):
            lock = directory.create(parsed)
        typer.echo(parsed.plan)
        drive(parsed, directory, lock)
        _print_next(directory)


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    steps: Annotated[int, typer.Option(min=0, help="Train until this step; 0: as configured")] = 0,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue although task data, rewards or offbeat changed")
    ] = False,
) -> None:
    """Resume a run from its last checkpoint: `offbeat resume runs/one`."""
    from offbeat.run.directory import RunDirectory, RunLock
    from offbeat.run.inputs import require_same_inputs

    directory = RunDirectory(run)
    with plain_errors(code=2):
        config = directory.config()
        lock = RunLock(directory)  # fails before anything heavy is imported if the run is already running
        try:
            if not accept_changes:
                require_same_inputs(directory, config)
        except BaseException:
            lock.release()
            raise
    with stopped_by_ctrl_c(_proceed(directory)):
        drive(config.model_copy(update={"steps": steps}) if steps else config, directory, lock)
        _print_next(directory)


def drive(config: "Config", directory: "RunDirectory", lock: "RunLock") -> None:
    """Run to the end with the live view, then print the ledger and where the run is."""
    from offbeat.drive import drive

    with plain_errors(_proceed(directory)):
        done = drive(config, directory, lock)
    typer.echo(str(done.ledger))
    if done.why:
        typer.echo(f"the run ended early: {done.why}")
    typer.echo(f"the run is in {directory.path}" + ("" if done.finished else f"; {_proceed(directory)}"))


def _proceed(directory: "RunDirectory") -> str:
    return f"continue with `offbeat resume {directory.path}`"


def _print_next(directory: "RunDirectory") -> None:
    """Print the two commands that people type next."""
    typer.echo(
        f"\nlook at the curves     offbeat report {directory.path}\n"
        f"look at the answers    offbeat view {directory.path}"
    )
