"""The `offbeat` command."""

import atexit
import os
import sys
from typing import Annotated

import typer

from offbeat import __version__
from offbeat.cli.check import check, explain, objectives
from offbeat.cli.doctor import doctor, fsck
from offbeat.cli.eval_ import eval_, score
from offbeat.cli.gap import gap
from offbeat.cli.init import init, quickstart
from offbeat.cli.log import feedback, import_, log
from offbeat.cli.report import export, report, view
from offbeat.cli.reproduce import reproduce
from offbeat.cli.terminal import interruptible, working_until_output
from offbeat.cli.train import resume, train, worker
from offbeat.imports import EXTRAS, install_command

app = typer.Typer(
    help="Off-policy group-relative RL for language models: sync rarely, reuse rollouts, and know when that is safe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_START = (quickstart, init, check, doctor, objectives, explain)
_WORK = (import_, feedback, eval_, score, train, resume, reproduce, export, report, view, gap, fsck, worker)
for command in _START + _WORK:  # in the order of `offbeat --help`
    app.command(command.__name__.rstrip("_"))(interruptible(command))
app.add_typer(log, name="log")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """The options of `offbeat` itself."""


def main() -> None:
    """Run the command line. If an extra is missing, print the command that installs it."""
    codes: list[int] = []
    atexit.register(_end_process, codes)  # registered first, so it runs last
    try:
        with working_until_output(" ".join(["offbeat", *sys.argv[1:2]])):
            app()
    except SystemExit as ended:
        codes.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except ModuleNotFoundError as missing:
        extra = EXTRAS.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        sys.exit(f"this command needs {missing.name}, which is not installed: {install_command(extra)}")


def _end_process(codes: list[int]) -> None:
    """End without taking down the interpreter, which takes seconds after torch was loaded. All threads have ended."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])
