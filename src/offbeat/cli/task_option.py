"""Options that several commands share: `--task` with `--set`, `--tokenizer`, and stored groups as text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from offbeat.cli.terminal import printable
from offbeat.errors import suggest_nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.importing.shapes import Encoder
    from offbeat.experience.reader import LogReader
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group, Json


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a local directory. Nothing is downloaded."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise typer.BadParameter(f"--tokenizer {directory} is not a directory")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--tokenizer {directory} has no tokenizer that can be loaded: {error}") from error


def encoder_of(tokenizer: "PreTrainedTokenizerBase", *, chat: bool) -> "Encoder":
    """Return the encoder for an import. With `chat`, a text prompt becomes a user message in the chat template."""
    from jinja2 import TemplateError

    from offbeat.experience.importing.records import UnreadableCell
    from offbeat.experience.importing.shapes import Encoder

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


TaskName = Annotated[str, typer.Option("--task", help="The name of a task, or the path of your own task file")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task, as JSON or text; can be repeated"),
]
TokenizerDirectory = Annotated[
    Path | None, typer.Option("--tokenizer", help="Directory of the tokenizer; default: `tokenizer` next to the log")
]
Workers = Annotated[int, typer.Option(min=1, help="Scoring processes")]


def make_task(name: str, settings: list[str] | None) -> "Task":
    """Return the task that `--task` names. `--task mine.py` is short for `--task custom --set path=mine.py`."""
    from offbeat.errors import TaskError
    from offbeat.tasks.task import make

    options: dict[str, Json] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {setting}: need KEY=VALUE, for example --set digits=3")
        options[key] = _parse_value(value)
    if name.endswith(".py"):
        options, name = {**options, "path": name}, "custom"
    try:
        return make(name, options)
    except (TaskError, OSError) as error:
        raise typer.BadParameter(printable(str(error))) from error


def _parse_value(text: str) -> "Json":
    try:
        return cast("Json", json.loads(text))
    except ValueError:
        return text


class StoredGroups:
    """The groups of one task in a log, and their completions as text."""

    def __init__(self, log: "LogReader", uri: str, task: "Task", tokenizer: Path | None) -> None:
        self._log, self._ordinals = log, log.filter(task=task.name)
        if not len(self._ordinals):
            raise typer.BadParameter(
                f"{uri} has no groups of task {task.name!r}; {suggest_nearest(task.name, log.tasks)}"
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
