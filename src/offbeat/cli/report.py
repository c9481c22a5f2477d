"""`offbeat report`."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.terminal import printable


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; report.html in the run directory, or here")
    ] = None,
) -> None:
    """One HTML file about a run, or about several compared: `offbeat report runs/one`.

    Works while a run goes on. Runs that differ in nothing but their seed are pooled:
    `offbeat report runs/lag4-seed* runs/lag0-seed* --out lag.html`
    """
    from offbeat.cli.terminal import plain_errors
    from offbeat.report.page import write_report

    to = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        with plain_errors(code=2):
            said = write_report(runs, to)
    except OSError as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from error
    typer.echo(printable(said))
    typer.echo(f"written to {to}")
