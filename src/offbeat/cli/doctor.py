"""`offbeat doctor`: what works here, what does not, and the command that mends it."""

from typing import Annotated

import typer

from offbeat.cli.terminal import printable


def doctor(
    engine: Annotated[bool, typer.Option("--engine", help="Start vLLM too and test it: half a minute")] = False,
) -> None:
    """Look at versions, extras, engines, sandbox and Ray; each lack with its cure: `offbeat doctor --engine`."""
    from offbeat.check.doctor import FindingState, look

    ill = absent = 0
    for finding in look(engine=engine):
        typer.echo(printable(str(finding)))
        ill += finding.state is FindingState.ILL
        absent += finding.state is FindingState.ABSENT
    typer.echo(f"{ill} ill, {absent} absent; what is absent is missed only by who wants to use it")
    if ill:
        raise typer.Exit(1)
