"""What all commands share: printable text, errors without tracebacks, the check that a log exists."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from offbeat.errors import OffbeatError


def printable(text: str) -> str:
    """Text that a model or a stranger wrote, made harmless for a terminal; lines stay lines.

    >>> print(printable("42\\x1b[2J\\u202e\\nnext"))
    42\\x1b[2J\\u202e
    next
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def plain_errors(advice: str = "", *, code: int = 1) -> Iterator[None]:
    """End the command with the message of an `OffbeatError`, then `advice`, without a traceback.

    `code` is the exit code: 2 where the command was given something it cannot use, 1 where the work failed.
    """
    try:
        yield
    except OffbeatError as error:
        typer.echo(printable(str(error)), err=True)
        if advice:
            typer.echo(advice, err=True)
        raise typer.Exit(code) from error


def has_log(uri: str) -> bool:
    """True if there is an experience log at `uri`. Opening one for writing would create it."""
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")


def require_log(uri: str) -> None:
    """End the command if there is no experience log at `uri`."""
    if not has_log(uri):
        typer.echo(f"there is no experience log at {uri}", err=True)
        raise typer.Exit(1)
