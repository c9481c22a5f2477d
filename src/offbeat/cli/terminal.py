"""What commands have in common when they speak to a person."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


def printable(text: str) -> str:
    """Text that a model or a stranger wrote, made harmless for a terminal; lines stay lines.

    >>> print(printable("42\\x1b[2J\\u202e\\nnext"))
    42\\x1b[2J\\u202e
    next
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def plainly() -> Iterator[None]:
    """Let an error that is meant for the person end the command with its sentence and without a traceback."""
    from offbeat.experience.exchange.records import CannotImport
    from offbeat.experience.table import LogError

    try:
        yield
    except (CannotImport, LogError) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(1) from error
