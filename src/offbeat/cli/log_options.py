"""Arguments and options of the commands that read or write an experience log."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import has_log, plain_errors

if TYPE_CHECKING:
    from offbeat.experience.validation import OnRefusal, Refusal

LogOrRun = Annotated[
    str,
    typer.Argument(metavar="LOG_OR_RUN", help="An experience log (a path or an object store URI) or a run directory"),
]
RefusedFile = Annotated[
    Path | None, typer.Option("--refused", help="Write every refusal with its line and reason to this JSONL file")
]


@dataclass(frozen=True)
class LogPlace:
    """An experience log, and the directory of the tokenizer that goes with it, if it is known."""

    uri: str
    tokenizer: Path | None = None


def locate_log(where: str) -> LogPlace:
    """Return the log at `where`, or the log of the run at `where`. It may not exist yet."""
    run = Path(where)
    if not has_log(where) and (run / "config.json").is_file() and (run / "environment.json").is_file():
        from offbeat.run.directory import RunDirectory

        with plain_errors():
            directory = RunDirectory(run)
            return LogPlace(directory.config().run.experience or str(directory.experience), _existing(run))
    return LogPlace(where, _existing(run) or _existing(run.parent))


def find_log(where: str) -> LogPlace:
    """Return the log at `where`, or end the command with an error if there is none."""
    place = locate_log(where)
    if not has_log(place.uri):
        about = f"{where} is a run, but " if place.uri.rstrip("/") != where.rstrip("/") else ""
        typer.echo(f"{about}there is no experience log at {place.uri}", err=True)
        raise typer.Exit(1)
    return place


def _existing(directory: Path) -> Path | None:
    tokenizer = directory / "tokenizer"
    return tokenizer if tokenizer.is_dir() else None


@contextmanager
def write_refusals(file: Path | None) -> "Iterator[OnRefusal]":
    """Yield a function that writes refusals to a file as they come. Without a file it does nothing."""
    if file is None:
        yield lambda where, refusal: None
        return
    try:
        lines = file.open("w", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--refused {file} cannot be written: {error.strerror}") from error

    def write(where: str, refusal: "Refusal") -> None:
        entry = {"where": where, "reason": str(refusal.reason), "detail": refusal.detail}
        lines.write(json.dumps(entry) + "\n")

    with lines:
        yield write


def parse_range(text: str | None) -> tuple[float, float] | None:
    """Parse `--reward-range`."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--reward-range {text!r} is not a range; give two numbers like 0,1") from None
    return low, high
