"""How a run begins: `offbeat init` writes a commented configuration, `offbeat quickstart` trains a tiny model."""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.errors import OffbeatError, suggest_nearest
from offbeat.tasks.data import Row, prompt_column
from offbeat.verify import chosen
from offbeat.verify.extract import boxed
from offbeat.verify.numbers import quantity
from offbeat.working import Working

if TYPE_CHECKING:
    from offbeat.config.knobs import Knob
    from offbeat.run.directory import RunDirectory

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
    typer.echo(f"{' and '.join(map(str, reversed(files)))} written; the first lines of {out} say what it needs. next:")
    if data is not None and "raise NotImplementedError" in files[task]:
        typer.echo(f"  write the function reward in {task}")
    for command in next_commands(found[recipe], out):
        typer.echo(f"  {command}")


def _own_data(data: str, model: str | None, task: Path) -> tuple[str, dict[str, object]]:
    """Return the task file for data, and settings that fit the task, the model and what is installed."""
    from offbeat.cli.init import own_task
    from offbeat.config import parse
    from offbeat.imports import missing_modules
    from offbeat.preflight.checks import model_files
    from offbeat.tasks.data import prompt_column, rows

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


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory for model, run and report")] = Path("runs/quickstart"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: as in the recipe")] = None,
) -> None:
    """Make a tiny model, train it off-policy and write a report: `offbeat quickstart`.

    Takes about three minutes on two CPU cores.
    """
    typer.echo("a tiny model learns one-digit sums off-policy, in about three minutes on two CPU cores")
    from offbeat.cli.train import drive
    from offbeat.config.parsing import load
    from offbeat.errors import RunError
    from offbeat.run.directory import RunDirectory

    directory = RunDirectory(out / "run")
    file = _write_configuration(out)
    config = load(file, [f"steps={steps}"] if steps else [])
    try:
        lock = directory.create(config)
    except RunError as error:
        typer.echo(printable(f"{error} with --out"), err=True)
        raise typer.Exit(2) from error
    typer.echo("1. a model: 0.1 M parameters, pre-trained on one-digit sums; six in ten have the same mistake")
    _make_model(out / "model")
    typer.echo(f"2. off-policy training: {config.plan}")
    drive(config, directory, lock)
    typer.echo(f"3. {_result(directory)}")
    _report(directory, out / "report.html")
    typer.echo(
        f"\nlook at the answers    offbeat view {directory.path}\n"
        f"understand a metric    offbeat explain drift_tv_token\n"
        f"train on-policy        offbeat train {file} --set sync.every=1 --out {out / 'fresh'}\n"
        "other recipes          offbeat init"
    )


def _make_model(directory: Path) -> None:
    from offbeat.imports import paused_collector

    with Working("   loading torch") as working:
        with paused_collector():
            from offbeat.run.quickstart import make_model

        working.next("   pre-training")
        make_model(directory, say=lambda line: working.say(f"   {line}"))


def _write_configuration(out: Path) -> Path:
    """Write the recipe with the path of the model."""
    out.mkdir(parents=True, exist_ok=True)
    recipe = re.sub(r'^path = ".*"$', f"path = '{out / 'model'}'", recipes()["quickstart"], flags=re.MULTILINE)
    file = out / "quickstart.toml"
    file.write_text(annotated(recipe), encoding="utf-8")
    return file


def _result(directory: "RunDirectory") -> str:
    from offbeat.evaluation import GREEDY
    from offbeat.events import EventKind
    from offbeat.run.journal import read

    events = list(read(directory.events))
    evaluated = [event for event in events if event["kind"] == EventKind.EVALUATED]
    published = sum(event["kind"] == EventKind.PUBLISHED for event in events) - 1
    if len(evaluated) < 2:
        return f"too few steps to measure learning, {published} publishes"
    changes = [
        " -> ".join(f"{cast('list[float]', event[name])[0]:.2f}" for event in (evaluated[0], evaluated[-1]))
        for name in ("pass@1", GREEDY)
    ]
    return f"pass rate {changes[0]}, of the most probable answers {changes[1]}, with {published} publishes"


def _report(directory: "RunDirectory", out: Path) -> None:
    """Write the report if jinja2 is installed."""
    from offbeat.imports import install_command, missing_modules

    if missing := missing_modules(["jinja2"]):
        typer.echo(f"   no report: {missing[0]} is not installed; install it with: {install_command('report')}")
        return
    with Working("   writing the report"):
        from offbeat.reports.page import write_report

        write_report([directory.path], out)
    typer.echo(f"   report: {out}")


ANSWERS: Final = (
    *("answer", "solution", "ground_truth", "final_answer", "reference_answer", "correct_answer", "reference"),
    *("expected", "target", "gold", "label", "output", "response", "completion"),
)
"""Names of the column with the right answer, the most reliable first."""
LONGEST: Final = 80
"""Characters of an answer that another one can equal word by word."""
_UNKNOWN: Final = 'raise NotImplementedError("say here what an answer is worth: return a number from 0 to 1")'
_FILE: Final = '''"""What is asked, and what an answer is worth. From `offbeat init own-data`; change it as you like."""

from pathlib import Path

from offbeat.tasks.data import ColumnMap, load
{imports}

def examples():
    return load({source}{columns}).examples


def reward(text, columns):
    """{meaning}. `columns` has the other columns of the row."""
    {body}
'''


def own_task(data: str, rows: Sequence[Row], *, beside: Path, chat: bool) -> tuple[str, str]:
    """Return the task file for data of which `rows` are the first, and what its reward is, in words.

    `beside` is the directory that the file will be in.

    >>> own_task("sums.jsonl", [{"question": "2+3=", "answer": "5"}], beside=Path(), chat=True)[1]
    '1 if the final answer is the number in answer, else 0'
    """
    prompt, path, source = prompt_column(rows[0]), Path(data), repr(data)
    column = next((name for name in ANSWERS if name != prompt and name in rows[0]), "")
    answers, cell = [row.get(column) for row in rows], f"columns[{column!r}]"
    if not column and isinstance(rows[0][prompt], list):  # of a conversation, the last message is the answer
        column, cell = prompt, f"columns[{prompt!r}][-1]['content']"
        answers = [cast(Any, row[prompt])[-1].get("content") for row in rows if row.get(prompt)]
    meaning, imports, body = _comparison(column, [str(answer).strip() for answer in answers], f"str({cell})")
    if path.exists():
        near = path.resolve().parent == beside.resolve()
        source = f"Path(__file__).with_name({path.name!r})" if near else repr(str(path.resolve()))
    columns = f", ColumnMap(prompt={prompt!r}, chat={chat})" if isinstance(rows[0][prompt], str) else ""
    return _FILE.format(source=source, columns=columns, imports=imports, meaning=meaning, body=body), meaning


def _comparison(column: str, answers: Sequence[str], cell: str) -> tuple[str, str, str]:
    """Return how completions are compared with a column: in words, an import, and a statement.

    >>> [_comparison("gold", [right], "")[0].split(" the ")[2] for right in ("#### 18", "B", "x^2", "Paris")]
    ['number after #### in gold, else 0', 'option in gold, else 0', 'formula in gold, else 0', 'text in gold, else 0']
    """
    for kind, fits, names, call in (
        (
            "number after #### in",
            lambda text: "####" in text,
            "numeric",
            f"numeric(text, {cell}.rpartition('####')[2])",
        ),
        ("number in", quantity, "numeric", f"numeric(text, {cell})"),
        ("option in", lambda text: chosen(text, "ABCDE") == text, "choice", f"choice(text, {cell})"),
        ("last formula in a box in", boxed, "extract, latex", f"latex.equivalent(text, extract.boxed({cell})[-1])"),
        ("formula in", lambda text: {"\\", "^"} & {*text}, "latex", f"latex.equivalent(text, {cell})"),
        ("text in", lambda text: 0 < len(text) <= LONGEST, "exact", f"exact(text, {cell})"),
    ):
        if column and all(map(fits, answers)):
            meaning = f"1 if the final answer is the {kind} {column}, else 0"
            return meaning, f"from offbeat.verify import {names}\n", f"return float({call})"
    why = f"the answers in {column} are too long to be compared" if column else "no column looks like the right answer"
    return f"Not written yet: {why}", "", _UNKNOWN
