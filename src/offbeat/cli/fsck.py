"""`offbeat fsck`: say what of a run is whole, and repair what can be repaired."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.terminal import plain_errors, printable


def fsck(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired; the run must not run")] = False,
) -> None:
    """Read everything in a run directory and say what is whole: `offbeat fsck runs/one`.

    Reads both logs, every checkpoint, the record and the ledger, one line each. The exit code is 0 if all of it is
    whole, 1 if something is damaged, 2 if there is no run. With `--repair` it is 0 if nothing is left for you to do.
    """
    from offbeat.run.directory import RunDirectory

    directory, left = RunDirectory(run), 0
    with plain_errors(code=2):
        directory.require_run()
        from offbeat.run.fsck.check import check_run, repair_run  # takes seconds
        from offbeat.run.fsck.findings import Remedy

        for found in repair_run(directory) if repair else check_run(directory):
            typer.echo(printable(str(found)))
            left += found.remedy is not None and not (repair and found.remedy is Remedy.RESUME)
    raise typer.Exit(1 if left else 0)
