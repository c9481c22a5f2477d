"""`--task` and `--set`, and completions of a stored task as text: what `eval` and `score` have in common."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.log import existing
from offbeat.cli.terminal import plainly, printable
from offbeat.cli.tokenizer import load_tokenizer
from offbeat.nearest import nearest

if TYPE_CHECKING:
    from offbeat.experience.reader import LogReader
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group, Json

TaskName = Annotated[str, typer.Option("--task", help="A task's name, or the path of a task file of your own")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task, value as JSON or text; may be repeated"),
]
TokenizerDirectory = Annotated[
    Path | None, typer.Option("--tokenizer", help="Directory of the tokenizer; else the one beside the log")
]
Workers = Annotated[int, typer.Option(min=1, help="Scoring processes")]


def make_task(name: str, settings: list[str] | None) -> "Task":
    """The task that was asked for; `--task mine.py` is short for `--task custom --set path=mine.py`."""
    from offbeat.tasks.registry import make
    from offbeat.tasks.task import TaskError

    options: dict[str, Json] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {setting}: need KEY=VALUE, for example --set digits=3")
        options[key] = _value(value)
    if name.endswith(".py"):
        options, name = {**options, "path": name}, "custom"
    try:
        return make(name, options)
    except (TaskError, OSError) as error:
        raise typer.BadParameter(printable(str(error))) from error


def _value(text: str) -> "Json":
    try:
        return cast("Json", json.loads(text))
    except ValueError:
        return text


@contextmanager
def stopping() -> Iterator[None]:
    """Let an error of tasks, scoring or the log end the command with its sentence and without a traceback."""
    from offbeat.tasks.reference import UnreachableFunction
    from offbeat.tasks.scoring import PoolError
    from offbeat.tasks.task import TaskError

    try:
        with plainly():
            yield
    except (PoolError, TaskError, UnreachableFunction) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(1) from error


class Stored:
    """The groups of one task in a log, with their completions as text."""

    def __init__(self, log: "LogReader", uri: str, task: "Task", tokenizer: Path | None) -> None:
        self._log, self._ordinals = log, log.filter(task=task.name)
        if not len(self._ordinals):
            raise typer.BadParameter(f"{uri} holds no groups of task {task.name!r}; {nearest(task.name, log.tasks)}")
        beside = [place for place in (Path(uri) / "tokenizer", Path(uri).parent / "tokenizer") if place.is_dir()]
        directory = tokenizer or next(iter(beside), None)
        self._tokenizer = load_tokenizer(directory) if directory else None

    @property
    def readable(self) -> bool:
        """Whether there is a tokenizer to read completions with."""
        return self._tokenizer is not None

    def text(self, completion: "Completion") -> str:
        """A completion as its scorer sees it."""
        if self._tokenizer is None:
            raise typer.BadParameter("completions are stored as tokens: give --tokenizer the directory of the model")
        return str(self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))

    def groups(self, *, at_once: int = 64) -> "Iterator[Group]":
        """In commit order, read some at a time, late scores in place."""
        for start in range(0, len(self._ordinals), at_once):
            yield from self._log.read(self._ordinals[start : start + at_once])


def require_log(uri: str) -> None:
    """End the command where there is no log: to look must not create one."""
    if not existing(uri):
        typer.echo(f"there is no experience log at {uri}", err=True)
        raise typer.Exit(1)
