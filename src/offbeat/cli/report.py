"""`offbeat report`: write an HTML report about one run or several."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.terminal import plain_errors, printable


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: report.html in the run")] = None,
) -> None:
    """Write an HTML report about one run, or a comparison of several: `offbeat report runs/one`.

    Works while a run is running. Runs that differ only in their seed are pooled:
    `offbeat report runs/lag4-seed* runs/lag0-seed* --out lag.html`
    """
    from offbeat.reports.page import write_report

    to = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        with plain_errors(code=2):
            conclusion = write_report(runs, to)
    except OSError as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from error
    typer.echo(printable(conclusion))
    typer.echo(f"written to {to}")
