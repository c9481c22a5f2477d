"""Helpers of all commands: printable text, errors without tracebacks, and a check that a log exists."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from offbeat.errors import OffbeatError


def printable(text: str) -> str:
    """Escape control characters in untrusted text, so that it is safe to print. Newlines stay.

    >>> print(printable("42\\x1b[2J\\u202e\\nnext"))
    42\\x1b[2J\\u202e
    next
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def plain_errors(advice: str = "", *, code: int = 1) -> Iterator[None]:
    """End the command with the message of an `OffbeatError`, then `advice`, without a traceback.

    `code` is the exit code: 2 if an argument is wrong, 1 if the work fails.
    """
    try:
        yield
    except OffbeatError as error:
        typer.echo(printable(str(error)), err=True)
        if advice:
            typer.echo(advice, err=True)
        raise typer.Exit(code) from error


def has_log(uri: str) -> bool:
    """Return True if there is an experience log at `uri`. Opening one for writing would create it."""
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")


def require_log(uri: str) -> None:
    """End the command with an error if there is no experience log at `uri`."""
    if not has_log(uri):
        typer.echo(f"there is no experience log at {uri}", err=True)
        raise typer.Exit(1)
