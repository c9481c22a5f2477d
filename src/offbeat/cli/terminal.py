"""Helpers of all commands: printable text, errors without tracebacks, signs that one works, and a check for a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from typing import Any, ParamSpec, TextIO, cast

import typer

from offbeat.errors import OffbeatError, first_line
from offbeat.working import SOON, Working

P = ParamSpec("P")


def printable(text: str) -> str:
    """Escape control characters in untrusted text, so that it is safe to print. Newlines stay.

    >>> print(printable("42\\x1b[2J\\u202e\\nnext"))
    42\\x1b[2J\\u202e
    next
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


@contextmanager
def working_until_output(what: str) -> Iterator[None]:
    """Show that a command works, until it writes something itself."""
    with Working(what, after=SOON) as working:
        out, err = (cast(TextIO, _NoticedStream(stream, working.end)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            yield


class _NoticedStream:
    """A stream that calls a function before it is written to."""

    def __init__(self, stream: TextIO, notice: Callable[[], None]) -> None:
        self._stream, self._notice = stream, notice

    def write(self, text: str) -> int:
        self._notice()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def plain_errors(advice: str = "", *, code: int = 1) -> Iterator[None]:
    """End the command with the message of an `OffbeatError`, then `advice`, without a traceback.

    A file that cannot be opened, read or written is a sentence too, and so is data too deep or too large to be read.

    `code` is the exit code: 2 if an argument is wrong, 1 if the work fails.
    """
    try:
        yield
    except OffbeatError as error:
        typer.echo(printable(str(error)), err=True)
        if advice and "offbeat resume" not in str(error):
            typer.echo(advice, err=True)
        raise typer.Exit(code) from error
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # nobody reads any more: there is nobody to tell
            raise
        why = ": ".join(str(one) for one in (error.filename, error.strerror or repr(error)) if one is not None)
        typer.echo(printable(f"{why}; check the path, its permissions and the disk"), err=True)
        raise typer.Exit(code) from error
    except (RecursionError, MemoryError, OverflowError, UnicodeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}; something is nested too deeply, too large, or not text"
        typer.echo(printable(f"{why}: check the files that the command reads"), err=True)
        raise typer.Exit(code) from error


def interruptible(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command end with a sentence after Ctrl-C; typer itself ends without a word."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        with plain_errors(), stopped_by_ctrl_c():
            command(*args, **kwargs)

    return wrapped


@contextmanager
def stopped_by_ctrl_c(advice: str = "") -> Iterator[None]:
    """End the command after Ctrl-C with `advice`, and with the exit code that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped" + (f"; {advice}" if advice else ""), err=True)
        raise typer.Exit(130) from None


def has_log(uri: str) -> bool:
    """Return True if there is an experience log at `uri`. Opening one for writing would create it."""
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")
