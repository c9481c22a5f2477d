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
from offbeat.imports import EXTRAS, command

app = typer.Typer(
    help="Off-policy group-relative RL for language models: sync rarely, reuse everything, know when it is safe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(quickstart)
app.command()(init)
app.command()(check)
app.command()(doctor)
app.command()(objectives)
app.command()(explain)
app.command("import")(import_)
app.command("eval")(eval_)
app.command()(score)
app.command()(train)
app.command()(resume)
app.command()(export)
app.command()(report)
app.command()(view)
app.command()(worker)
app.add_typer(log, name="log")


@app.callback()
def _root() -> None:
    """Keeps commands named even while there is only one."""


def main() -> None:
    """Run the command line; a missing extra ends in the command that installs it."""
    try:
        app()
    except ModuleNotFoundError as missing:
        extra = EXTRAS.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        sys.exit(f"this command needs {missing.name}, which is not installed: {command(extra)}")
