"""`offbeat doctor`: what works on this machine, what does not, and the command that fixes it."""

from typing import Annotated

import typer

from offbeat.cli.terminal import printable


def doctor(
    engine: Annotated[bool, typer.Option("--engine", help="Also start vLLM and test it; takes half a minute")] = False,
) -> None:
    """Check versions, extras, engines, sandbox and Ray, and show how to fix problems: `offbeat doctor --engine`."""
    from offbeat.preflight.doctor import FindingState, diagnose

    broken = missing = 0
    for finding in diagnose(engine=engine):
        typer.echo(printable(str(finding)))
        broken += finding.state is FindingState.BROKEN
        missing += finding.state is FindingState.MISSING
    typer.echo(f"{broken} broken, {missing} missing; missing parts are needed only for the features they name")
    if broken:
        raise typer.Exit(1)
