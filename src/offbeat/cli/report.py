"""`offbeat report`: write an HTML report about one run or several, or serve it while they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.terminal import plain_errors, printable


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories, or NAME=directory")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: report.html in the run")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A name for each run, or for each configuration, in their order")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve the report on this machine, and update it")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --live; 0: a free one")] = 0,
) -> None:
    """Write an HTML report about one run, or a comparison of several: `offbeat report runs/one`.

    Works while a run is running; `--live` keeps the page up to date. Runs that differ only in their seed are pooled:
    `offbeat report runs/lag4-seed* runs/lag0-seed* --name lag4 --name lag0 --out lag.html`
    """
    from offbeat.reports.pools import split_name

    named, paths = zip(*map(split_name, runs), strict=True)
    names = name or (named if any(named) else [])
    if (live and out is not None) or (port and not live):
        typer.echo(
            "--live serves the report and writes no file: give --out or --live; --port belongs to --live", err=True
        )
        raise typer.Exit(2)
    if live:
        _serve(paths, names, port)
        return
    _write(paths, names, out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html")))


def _write(paths: Sequence[Path], names: Sequence[str], to: Path) -> None:
    from offbeat.reports.page import write_report

    try:
        with plain_errors(code=2):
            conclusion = write_report(paths, to, names)
    except OSError as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(2) from error
    typer.echo(printable(conclusion))
    typer.echo(f"written to {to}")


def _serve(paths: Sequence[Path], names: Sequence[str], port: int) -> None:
    from offbeat.reports.page import load_runs
    from offbeat.reports.serve import ReportServer, ReportSource

    with plain_errors(code=2):
        load_runs(paths, names)  # a wrong directory is an error here, not in the browser
        server = ReportServer(ReportSource(paths, names), port)
    with server:
        try:
            typer.echo(f"live report: {server.url}\nIt is served to this machine only; Ctrl-C ends it.")
            server.serve_forever()
        except KeyboardInterrupt:
            again = " ".join(map(str, paths))
            typer.echo(printable(f"\nThe live report has ended. To keep a copy: offbeat report {again}"))
