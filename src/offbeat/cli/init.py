"""`offbeat init`: write a configuration file in which a comment explains every setting."""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.errors import OffbeatError, suggest_nearest

if TYPE_CHECKING:
    from offbeat.config.knobs import Knob


PLACES: Final = {
    "a laptop": "on a laptop, without a GPU",
    "one GPU": "on one GPU",
    "a node": "on a node with several GPUs",
    "a cluster": "on a cluster",
}
"""What a recipe is for, as in its line `# for:`, and the title of its group in the list."""
OWN: Final = "own-data"
"""The recipe that comes with a task file for `--data`."""
LOOKED_AT: Final = 1000
"""Rows of the data from which the task file is made."""


def init(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; without one, all are listed")] = None,
    out: Annotated[Path, typer.Option(help="The file to write")] = Path("run.toml"),
    data: Annotated[
        str | None, typer.Option(help="Of own-data: JSONL, Parquet, a saved dataset, or owner/name of the hub")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The directory of a model, or owner/name of the hub; default: the recipe's")
    ] = None,
) -> None:
    """Write a commented configuration file from a recipe: `offbeat init quickstart --out run.toml`.

    For prompts of your own: `offbeat init own-data --data questions.jsonl --model MODEL`. It finds the columns (prompt,
    question, problem or messages; answer, solution, ground_truth or label), and writes a task file with the reward
    function beside the configuration.
    """
    found = recipes()
    if recipe is None:
        _list_recipes(found)
        return
    if recipe not in found:
        raise typer.BadParameter(f"{recipe!r} is not a recipe; {suggest_nearest(recipe, found)}")
    if (data is None) == (recipe == OWN):
        raise typer.BadParameter(f"--data is the file with your prompts: offbeat init {OWN} --data questions.jsonl")
    settings: dict[str, object] = {"model.path": model} if model else {}
    files = {}
    if data is not None:
        task = out.with_name(f"{Path(data).stem}_task.py")
        with plain_errors(code=2):
            files[task], fitting = _own_data(data, model, task)
        settings |= fitting
    text = _with_settings(found[recipe], settings)
    files[out] = annotated(text if data is None else _with_command(text, data, model))
    for file, text in files.items():
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text)
        except FileExistsError:
            elsewhere = "another name" if file == out else "a file in another directory"
            raise typer.BadParameter(f"{file} already exists; delete it, or choose {elsewhere} with --out") from None
        except OSError as error:
            raise typer.BadParameter(f"{file} cannot be written: {error}") from error
    typer.echo(f"{' and '.join(map(str, reversed(files)))} written; the first lines of {out} say what it needs. next:")
    if data is not None and "raise NotImplementedError" in files[task]:
        typer.echo(f"  write the function reward in {task}")
    for command in next_commands(found[recipe], out):
        typer.echo(f"  {command}")


def _own_data(data: str, model: str | None, task: Path) -> tuple[str, dict[str, object]]:
    """Return the task file for data, and settings that fit the task, the model and what is installed."""
    from offbeat.config import parse
    from offbeat.imports import missing_modules
    from offbeat.preflight.checks import model_files
    from offbeat.tasks.data import prompt_column, rows
    from offbeat.tasks.own_data import own_task

    some = list(islice(rows(data), LOOKED_AT))
    if not some:
        raise typer.BadParameter(f"{data} holds no rows; check the path")
    if {"reward", "rewards", "score", "scores"} & some[0].keys():
        raise typer.BadParameter(
            f"the rows of {data} are answers with rewards. To train on them, import them and generate nothing: "
            f"offbeat import {data} --into experience --source model:other --tokenizer MODEL, then offbeat init offline"
        )
    chat, settings = True, dict[str, object]({"task.name": str(task)})
    with suppress(OffbeatError):  # `offbeat check` says what is wrong with the model
        files = model_files(parse({"model": {"path": model or ""}}))
        context, chat = files.integer("max_position_embeddings", 1 << 20), bool(files.chat_template)
        longest = min(512, context // 2)
        settings |= {"sampling.max_tokens": longest, "engine.max_prompt_tokens": min(1024, context - longest)}
        settings |= {"engine.kind": "hf"} if files.tiny else {}
    settings |= {"engine.kind": "hf"} if missing_modules(["vllm"]) else {}
    text, meaning = own_task(data, some, beside=task.parent, chat=chat)
    prompt = prompt_column(some[0])
    typer.echo(printable(f"prompt: {prompt}{', as a user message' if chat else ''}: {some[0][prompt]!r:.80}"))
    typer.echo(printable(f"reward: {meaning}"))
    return text, settings


def _with_command(recipe: str, data: str, model: str | None) -> str:
    """Return the recipe for own data with the command that wrote it."""
    typed = ["offbeat", "init", OWN, "--data", data, *(["--model", model] if model else [])]
    return re.sub(rf"offbeat init {OWN} --data .*", lambda _: shlex.join(typed), recipe)


def _with_settings(recipe: str, settings: Mapping[str, object]) -> str:
    """Return a recipe with other values for settings that it has.

    >>> _with_settings("[model]\\npath = 'model'", {"model.path": "a/b"})
    '[model]\\npath = "a/b"'
    """
    lines, table = recipe.split("\n"), ""
    for number, line in enumerate(lines):
        if header := re.match(r"\[([\w.]+)\]", line):
            table = header[1] + "."
        elif (setting := re.match(r"(\w+) = ", line)) and (key := table + setting[1]) in settings:
            lines[number] = f"{setting[1]} = {json.dumps(settings[key])}"
    return "\n".join(lines)


def _list_recipes(found: dict[str, str]) -> None:
    """Print the recipes by what a user has, with memory and time; those for your own model come last."""
    for place, title in PLACES.items():
        typer.echo(f"{title}:")
        for name, text in sorted(found.items(), key=lambda one: "your model" in facts(one[1])["needs"]):
            known = facts(text)
            if known["for"] == place:
                gpus = f"{known['hardware']}: " if "hardware" in known else ""
                typer.echo(f"  {name:20}  {text.partition(chr(10))[0].removeprefix(f'# {name}: ')}")
                typer.echo(f"  {'':20}  {gpus}{known['needs']}")
        typer.echo("")
    typer.echo(
        "4x8x80 means four nodes of eight GPUs with 80 GiB. Memory is that of the device plan. An estimated time is\n"
        "that of the arithmetic at 100 TFLOP/s a GPU, if every answer is as long as allowed; we have no GPU to measure."
    )
    typer.echo("\nnext: offbeat init NAME, then offbeat check run.toml and offbeat train run.toml")


def facts(text: str) -> dict[str, str]:
    """Return what a recipe says about itself, by name: for, hardware and needs.

    >>> facts(recipes()["gsm8k-qwen2.5-0.5b"])["hardware"]
    '1x24'
    """
    return dict(re.findall(r"^# (for|hardware|needs): (.+)$", text, re.M))


def next_commands(text: str, file: Path) -> list[str]:
    """Return what to type after a recipe was written to a file: first the commands that prepare its data.

    >>> next_commands(recipes()["8b-one-node"], Path("run.toml"))
    ['offbeat check run.toml --gpus 8x80', 'offbeat train run.toml']
    """
    first = re.findall(r"^# (offbeat (?:quickstart|import|export)\b.*?)(?: --dry-run)?$", text, re.M)
    train = re.search(r"^# +(offbeat train run\.toml .*?) *(?:#.*)?$", text, re.M)
    gpus = facts(text).get("hardware")
    check = "offbeat check run.toml" + (f" --gpus {gpus}" if gpus else "")
    commands = [*first, check, train[1] if train else "offbeat train run.toml"]
    return [re.sub(r"\brun\.toml\b", lambda _: shlex.quote(str(file)), command) for command in commands]


def recipes() -> dict[str, str]:
    """Return the text of the recipes that come with offbeat, by name."""
    from importlib.resources import files

    place = files("offbeat").joinpath("recipes")
    names = sorted(entry.name.removesuffix(".toml") for entry in place.iterdir() if entry.name.endswith(".toml"))
    return {name: place.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in names}


def annotated(text: str) -> str:
    """Return a recipe with a comment above every setting.

    >>> print(annotated("[sampling]\\ntop_k = 0"))
    [sampling]
    # 0 samples from the whole distribution. More than 0 works only with objectives without behavior log-probs. (a
    # whole number, at least 0; default 0)
    top_k = 0
    """
    from offbeat.config.knobs import knobs

    lines: list[str] = []
    table = ""
    for line in text.split("\n"):
        if header := re.match(r"\[([\w.]+)\]", line):
            table = header[1] + "."
        elif setting := re.match(r"(\w+) = ", line):
            lines += _comment(knobs()[table + setting[1]])
        lines.append(line)
    return "\n".join(lines)


def _comment(knob: "Knob") -> list[str]:
    default = f"; default {knob.default}" if knob.default not in ("", '""', "{}") else ""
    lines = textwrap.wrap(f"{knob.meaning} ({knob.kind}{default})", 108, break_on_hyphens=False)
    return [f"# {line}" for line in lines]
