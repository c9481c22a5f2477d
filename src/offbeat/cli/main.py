"""The `offbeat` command."""

import sys

import typer

from offbeat.cli.check import check
from offbeat.cli.doctor import doctor
from offbeat.cli.eval_ import eval_
from offbeat.cli.explain import explain, objectives
from offbeat.cli.export import export
from offbeat.cli.import_ import import_
from offbeat.cli.init import init
from offbeat.cli.log import log
from offbeat.cli.quickstart import quickstart
from offbeat.cli.report import report
from offbeat.cli.score import score
from offbeat.cli.train import resume, train
from offbeat.cli.view import view
from offbeat.cli.worker import worker
from offbeat.imports import EXTRAS, install_command

app = typer.Typer(
    help="Off-policy group-relative RL for language models: sync rarely, reuse rollouts, and know when that is safe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_START = (quickstart, init, check, doctor, objectives, explain)
_WORK = (import_, eval_, score, train, resume, export, report, view, worker)
for command in _START + _WORK:  # in the order of `offbeat --help`
    app.command(command.__name__.rstrip("_"))(command)
app.add_typer(log, name="log")


def main() -> None:
    """Run the command line. If an extra is missing, print the command that installs it."""
    try:
        app()
    except ModuleNotFoundError as missing:
        extra = EXTRAS.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        sys.exit(f"this command needs {missing.name}, which is not installed: {install_command(extra)}")
