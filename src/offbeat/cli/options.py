"""Arguments and options of several commands: a log or run, `--task` with `--set`, `--tokenizer`, `--refused`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.terminal import has_log, plain_errors, printable
from offbeat.errors import ModelUnreadable
from offbeat.working import SOON, Working

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.reader import LogReader
    from offbeat.experience.validation import OnRefusal, Refusal
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group, Json

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
    lines = file.open("w", encoding="utf-8")

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


def load_tokenizer(directory: Path, chat_template_kwargs: "dict[str, Json] | None" = None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a local directory. Nothing is downloaded."""
    with Working("loading transformers", after=SOON):
        import transformers  # noqa: F401  # takes seconds

        from offbeat.tasks.tokenizer import read_tokenizer

    try:
        return read_tokenizer(directory, chat_template_kwargs)
    except ModelUnreadable as error:
        raise typer.BadParameter(printable(f"--tokenizer {directory}: {error}")) from error


TaskName = Annotated[str, typer.Option("--task", help="The name of a task, or the path of your own task file")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task, as JSON or text; can be repeated"),
]
TokenizerDirectory = Annotated[
    Path | None, typer.Option("--tokenizer", help="Directory of the tokenizer; default: `tokenizer` next to the log")
]
Workers = Annotated[int, typer.Option(min=1, help="Scoring processes")]
TemplateVariables = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template",
        metavar="NAME=VALUE",
        help="A variable of the chat template, for example enable_thinking=false; can be repeated",
    ),
]


def make_task(name: str, settings: list[str] | None) -> "Task":
    """Return the task that `--task` names: a task of offbeat, or your own file."""
    from offbeat.errors import TaskError
    from offbeat.tasks.task import make

    try:
        return make(name, _parse_pairs("--set", settings, "digits=3"))
    except (TaskError, OSError) as error:
        raise typer.BadParameter(printable(str(error))) from error


def template_variables(pairs: list[str] | None) -> "dict[str, Json] | None":
    """Return the values that `--chat-template` gives to variables of the chat template; None if there are none."""
    return _parse_pairs("--chat-template", pairs, "enable_thinking=false") or None


def _parse_pairs(option: str, pairs: list[str] | None, example: str) -> "dict[str, Json]":
    found: dict[str, Json] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option} {pair}: need KEY=VALUE, for example {option} {example}")
        found[key] = _parse_value(value)
    return found


def stored_task_name(text: str) -> str:
    """Return the name under which groups of a task are stored. A path names your own file; other text is a name.

    A run stores the name that the task itself has, so your file is loaded to read it.
    """
    return make_task(text, None).name if text.endswith(".py") else text


def _parse_value(text: str) -> "Json":
    try:
        return cast("Json", json.loads(text))
    except ValueError:
        return text


class StoredGroups:
    """The groups of one task in a log, or of all, and their completions as text."""

    def __init__(self, log: "LogReader", uri: str, task: "Task | None", tokenizer: Path | None) -> None:
        self._log, self._ordinals = log, log.filter(task=task.name if task else None)
        if not len(self._ordinals) and task is None:
            raise typer.BadParameter(f"{uri} has no groups; add some with `offbeat import FILE --into {uri} …`")
        if not len(self._ordinals) and task is not None:
            raise typer.BadParameter(
                f"{uri} has no groups of task {task.name!r}; it has groups of: {', '.join(log.tasks) or 'no task'}"
            )
        candidates = [place for place in (Path(uri) / "tokenizer", Path(uri).parent / "tokenizer") if place.is_dir()]
        directory = tokenizer or next(iter(candidates), None)
        self._tokenizer = load_tokenizer(directory) if directory else None

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def text(self, completion: "Completion") -> str:
        """Decode a completion, without special tokens, as the scorer sees it."""
        if self._tokenizer is None:
            raise typer.BadParameter("completions are stored as token ids; give a tokenizer with --tokenizer")
        return str(self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))

    def groups(self, *, at_once: int = 64) -> "Iterator[Group]":
        """Yield the groups in commit order, with late scores applied, and read `at_once` at a time."""
        for start in range(0, len(self._ordinals), at_once):
            yield from self._log.read(self._ordinals[start : start + at_once])
