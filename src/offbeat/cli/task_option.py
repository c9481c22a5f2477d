"""`--task` and `--set`, and completions of a stored task as text: what `eval` and `score` have in common."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.terminal import printable
from offbeat.errors import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.importing.shapes import Encoder
    from offbeat.experience.reader import LogReader
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group, Json


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer, from the directory alone: nothing is fetched."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise typer.BadParameter(f"--tokenizer {directory} is not a directory")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--tokenizer {directory} holds no tokenizer that can be loaded: {error}") from error


def encoder_of(tokenizer: "PreTrainedTokenizerBase", *, chat: bool) -> "Encoder":
    """What the importer needs of a tokenizer; with `chat`, a prompt given as text becomes a user's message."""
    from jinja2 import TemplateError

    from offbeat.experience.importing.shapes import Encoder
    from offbeat.experience.importing.values import UnreadableCell

    if chat and not tokenizer.chat_template:
        raise typer.BadParameter("--chat was given, but the tokenizer has no chat template")

    def encode_chat(messages: list[dict[str, str]]) -> list[int]:
        try:
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except TemplateError as error:
            raise UnreadableCell(f"the chat template refuses the prompt: {error!s:.120}") from error

    return Encoder(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        encode_prompt=lambda text: (
            encode_chat([{"role": "user", "content": text}]) if chat else list(tokenizer.encode(text))
        ),
        encode_chat=encode_chat if tokenizer.chat_template else None,
        end=tokenizer.eos_token_id,
    )


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
    from offbeat.errors import TaskError
    from offbeat.tasks.registry import make

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
