"""Every command against every bad model directory, broken or changed task, and damaged file of a run.

    python -m lab.attacks.bad_inputs           minutes; writes row hardening.7
    python -m lab.attacks.bad_inputs --short   every fifth pair; records nothing

One good run of two steps is made first. For each pair one thing in it is spoiled, the command is called in this
process, and the run is restored from a copy. A pair is right if the command ends with the expected exit code (2 for a
wrong argument, 1 for work that fails, 0 where the damage does not concern it) and, where it refuses, with one sentence
and no traceback.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lab.figures import Figure, command_parser, report
from tests.fixtures.tiny_model import save_model

STEPS = 2
TASK = """
import json
from pathlib import Path

def examples():
    return [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]

def reward(text, columns):
    return float(any(c.isdigit() for c in text))
"""
TOML = """
steps = {steps}
prompts_per_step = 2
group_size = 4
[model]
path = "{place}/model"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
max_prompt_tokens = 16
[sampling]
max_tokens = 5
[objective]
zero_variance_mask = false
[task]
name = "{place}/task/digits.py"
scorers = 1
[evaluation]
hold_out = 0.0
[run]
mode = "concurrent"
max_lag = 2
"""
ADVICE = ("nothing was started", "continue with `offbeat resume", "Usage:", "Try '")
"""Lines beside the sentence: how many problems there are, how to continue, and the frame of typer's own errors."""

PROGRESS = re.compile(
    r"[a-z0-9:% ]+ \.+|\d+ distinct prompts.*|the (policy|model).* answers of at most .*|evaluation before .*"
)
"""What a command says while it works: "loading torch ..."."""


@dataclass(frozen=True)
class Setup:
    """A place with a model, a task, a configuration file and a run."""

    place: Path

    @property
    def model(self) -> Path:
        return self.place / "model"

    @property
    def task(self) -> Path:
        return self.place / "task" / "digits.py"

    @property
    def toml(self) -> Path:
        return self.place / "run.toml"

    @property
    def run(self) -> Path:
        return self.place / "run"

    @property
    def checkpoint(self) -> Path:
        return sorted((self.run / "checkpoints").glob("step-*"))[-1]

    @classmethod
    def make(cls, place: Path) -> "Setup":
        """Write everything and train the run."""
        made = cls(place)
        made.model.mkdir(parents=True)
        save_model(made.model)
        made.task.parent.mkdir()
        made.task.write_text(TASK)
        rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
        (made.task.parent / "rows.jsonl").write_text("\n".join(rows))
        made.toml.write_text(TOML.format(steps=STEPS, place=place))
        outcome = call("train", str(made.toml), "--out", str(made.run))
        if outcome.code:
            raise SystemExit(f"the good run failed: {outcome.output}")
        lines = (made.run / "events.jsonl").read_text().splitlines(keepends=True)
        (made.run / "events.jsonl").write_text("".join(lines[:-1]))  # as if it was killed: a worker may join it
        return made

    def restore(self, kept: Path) -> None:
        """Undo all damage, from a copy. The place stays the same, because a run knows its paths."""
        shutil.rmtree(self.place)
        shutil.copytree(kept, self.place)


@dataclass(frozen=True)
class CommandOutcome:
    """How a command ended."""

    code: int
    output: str
    error: str
    """The class of an exception that the command did not catch; empty if there was none."""
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """The lines that say what is wrong."""
        lines = [line.strip("│╭╮╰╯─ ") for line in self.output.splitlines()]
        said = [line for line in lines if line and line != "Error" and not PROGRESS.fullmatch(line)]
        return [line for line in said if not any(word in line for word in ADVICE)]


def call(*arguments: str) -> CommandOutcome:
    """Run a command in this process, as a new process would: task files are loaded again."""
    from typer.testing import CliRunner

    from offbeat.cli.main import app

    for name in [name for name in sys.modules if name.startswith("file:")]:
        del sys.modules[name]
    began = time.monotonic()
    result = CliRunner(env={"COLUMNS": "2000"}).invoke(app, arguments)
    error = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    return CommandOutcome(result.exit_code, result.output, error, time.monotonic() - began)


Spoil = Callable[[Setup], object]
Call = Callable[[Setup], Sequence[str]]


def edit(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | entries))


def drop_tensor(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(model / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), model / "model.safetensors", {"format": "pt"})


def cut(file: Path, bytes_: int = 40) -> None:
    file.write_bytes(file.read_bytes()[:-bytes_])


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


MODELS: dict[str, Spoil] = {
    "a Python file": lambda it: (it.model / "modeling_own.py").write_text("1 / 0"),
    "auto_map of the model": lambda it: edit(it.model / "config.json", auto_map={"AutoModel": "x.Y"}),
    "auto_map of the tokenizer": lambda it: edit(it.model / "tokenizer_config.json", auto_map={"AutoTokenizer": "x.Y"}),
    "pickled, .bin": lambda it: (it.model / "model.safetensors").rename(it.model / "pytorch_model.bin"),
    "pickled, .pt": lambda it: (it.model / "model.safetensors").rename(it.model / "model.pt"),
    "pickled, .pkl": lambda it: (it.model / "model.safetensors").rename(it.model / "model.pkl"),
    "an adapter": lambda it: edit(it.model / "adapter_config.json", base_model_name_or_path="other"),
    "no weights": lambda it: (it.model / "model.safetensors").unlink(),
    "cut weights": lambda it: cut(it.model / "model.safetensors"),
    "weights that are text": lambda it: (it.model / "model.safetensors").write_text("version https://git-lfs"),
    "a missing shard": lambda it: edit(it.model / "model.safetensors.index.json", weight_map={"a": "b.safetensors"}),
    "a torn config.json": lambda it: cut(it.model / "config.json"),
    "config.json is a list": lambda it: (it.model / "config.json").write_text("[]"),
    "no config.json": lambda it: (it.model / "config.json").unlink(),
    "no directory": lambda it: shutil.rmtree(it.model),
}
LOADED: dict[str, Spoil] = {
    "a missing tensor": lambda it: drop_tensor(it.model),
    "a torn tokenizer.json": lambda it: cut(it.model / "tokenizer.json"),
    "a torn generation_config.json": lambda it: cut(it.model / "generation_config.json"),
}
"""Found only when the model or its tokenizer is loaded."""
TASKS: dict[str, Spoil] = {
    "a syntax error": lambda it: it.task.write_text("def reward(:\n"),
    "a task file that raises": lambda it: it.task.write_text("1 / 0"),
    "a module that is missing": lambda it: it.task.write_text("import nowhere_at_all"),
    "no task file": lambda it: it.task.unlink(),
    "no reward": lambda it: it.task.write_text("examples = [{'prompt': '1'}]"),
    "binary task file": lambda it: it.task.write_bytes(b"\x00\xff\xfe"),
}
DATA: dict[str, Spoil] = {
    "no data": lambda it: (it.task.parent / "rows.jsonl").unlink(),
    "torn data": lambda it: cut(it.task.parent / "rows.jsonl", 5),
    "binary data": lambda it: (it.task.parent / "rows.jsonl").write_bytes(b"\xff\xfe\x00"),
}
CHANGED: dict[str, Spoil] = {
    "changed data": lambda it: (it.task.parent / "rows.jsonl").write_text('{"prompt": "7+7=", "answer": "14"}'),
    "a changed reward": lambda it: it.task.write_text(TASK.replace("float(any", "0.5 * float(any")),
}
FILES: dict[str, Spoil] = {
    "an empty config.json": lambda it: (it.run / "config.json").write_text(""),
    "a torn config.json of the run": lambda it: cut(it.run / "config.json"),
    "a binary config.json": lambda it: (it.run / "config.json").write_bytes(b"\xff\xfe\x00\x01"),
    "config.json of the run is a list": lambda it: (it.run / "config.json").write_text("[1]"),
    "config.json with a section that is a number": lambda it: edit(it.run / "config.json", sampler=7),
    "no config.json of the run": lambda it: (it.run / "config.json").unlink(),
}
CHECKPOINTS: dict[str, Spoil] = {
    "a torn manifest": lambda it: cut(it.checkpoint / "manifest.json"),
    "an empty manifest": lambda it: (it.checkpoint / "manifest.json").write_text(""),
    "a binary manifest": lambda it: (it.checkpoint / "manifest.json").write_bytes(b"\xff\x00"),
    "a manifest of another shape": lambda it: (it.checkpoint / "manifest.json").write_text('{"step": "x"}'),
    "no checkpoints": lambda it: shutil.rmtree(it.run / "checkpoints"),
}
JOURNALS: dict[str, Spoil] = {
    "a torn events.jsonl": lambda it: cut(it.run / "events.jsonl"),
    "a binary events.jsonl": lambda it: (it.run / "events.jsonl").write_bytes(b"\xff\xfe\x00" * 100),
    "events.jsonl of numbers": lambda it: (it.run / "events.jsonl").write_text("1\n2\n[]\nnull\n"),
    "an event without fields": lambda it: (it.run / "events.jsonl").write_text('{"kind": "step"}\n{"step": {}}\n'),
}
CONFIGS: dict[str, Spoil] = {
    "a torn run.toml": lambda it: it.toml.write_text("[model\npath"),
    "a binary run.toml": lambda it: it.toml.write_bytes(b"\xff\xfe\x00"),
    "run.toml is a directory": lambda it: make_directory(it.toml),
    "no run.toml": lambda it: it.toml.unlink(),
}

TRAIN: Call = lambda it: ["train", str(it.toml), "--out", str(it.place / "new")]  # noqa: E731
CHECK: Call = lambda it: ["check", str(it.toml)]  # noqa: E731
RESUME: Call = lambda it: ["resume", str(it.run), "--steps", "3"]  # noqa: E731
WORKER: Call = lambda it: ["worker", str(it.run), "--groups", "1"]  # noqa: E731
EVAL_MODEL: Call = lambda it: ["eval", str(it.model), "--task", str(it.task), "--prompts", "2", "--samples", "2"]  # noqa: E731
EVAL_RUN: Call = lambda it: ["eval", str(it.run), "--prompts", "2", "--samples", "2"]  # noqa: E731
EXPORT: Call = lambda it: ["export", str(it.run), str(it.place / "exported")]  # noqa: E731
REPORT: Call = lambda it: ["report", str(it.run), "--out", str(it.place / "report.html")]  # noqa: E731
VIEW: Call = lambda it: ["view", str(it.run), "--plain"]  # noqa: E731
SCORE: Call = lambda it: ["score", str(it.run), "--task", str(it.task)]  # noqa: E731


@dataclass(frozen=True)
class Pair:
    """One command on one bad input."""

    command: Call
    name: str
    spoil: Spoil
    codes: tuple[int, ...]
    """Exit codes that are right."""
    about: str
    """What a refusal must name."""


def pairs() -> Iterator[Pair]:
    """Yield every pair, with what the command must do."""

    def of(about: str, inputs: dict[str, Spoil], commands: Sequence[Call], *codes: int) -> Iterator[Pair]:
        for (name, spoil), command in product(inputs.items(), commands):
            yield Pair(command, name, spoil, codes, about)

    yield from of("/model", MODELS, [TRAIN, CHECK], 2)
    yield from of("/model", MODELS, [EVAL_MODEL, EVAL_RUN], 2)
    yield from of("/model", MODELS, [RESUME, WORKER], 1, 2)
    yield from of("/model", LOADED, [EVAL_MODEL, RESUME, WORKER], 1, 2)
    yield from of("/digits.py", TASKS, [TRAIN, CHECK, RESUME, WORKER, EVAL_MODEL, EVAL_RUN, SCORE], 1, 2)
    yield from of("/digits.py", DATA, [TRAIN, CHECK, RESUME, WORKER, EVAL_MODEL, EVAL_RUN], 1, 2)
    yield from of("", DATA, [SCORE], 0)
    yield from of("changed since the newest checkpoint", CHANGED, [RESUME], 2)
    yield from of("", FILES, [RESUME, WORKER, EVAL_RUN, REPORT, VIEW], 2)
    yield from of("checkpoint", CHECKPOINTS, [EXPORT, EVAL_RUN], 1, 2)
    yield from of("", JOURNALS, [REPORT, VIEW], 0)
    yield from of("run.toml", CONFIGS, [TRAIN, CHECK], 2)


def judge(pair: Pair, outcome: CommandOutcome) -> str:
    """Return what is wrong with an outcome; empty if nothing is."""
    if outcome.error or "Traceback" in outcome.output:
        return f"raised {outcome.error or outcome.output[-300:]}"
    if outcome.code not in pair.codes:
        return f"exit code {outcome.code} instead of {pair.codes}: {outcome.output[-300:]}"
    if outcome.code and len(outcome.sentences) != 1:
        return f"{len(outcome.sentences)} lines instead of one sentence: {outcome.sentences[:4]}"
    if outcome.code and pair.about not in outcome.sentences[0]:
        return f"does not name {pair.about}: {outcome.sentences[0]}"
    return ""


def main() -> int:
    parser = command_parser(__doc__, short="every fifth pair")
    parser.add_argument("--only", default="", help="pairs whose command and input contain this text")
    arguments = parser.parse_args()
    chosen = list(pairs())[:: 5 if arguments.short else 1]
    wrong, slowest = [], 0.0
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as scratch:
        setup, kept = Setup.make(Path(scratch) / "place"), Path(scratch) / "kept"
        shutil.copytree(setup.place, kept)
        tried = 0
        for pair in chosen:
            name = f"{pair.command(setup)[0]}: {pair.name}"
            if arguments.only not in name:
                continue
            setup.restore(kept)
            pair.spoil(setup)
            outcome = call(*pair.command(setup))
            tried, slowest = tried + 1, max(slowest, outcome.seconds)
            if problem := judge(pair, outcome):
                wrong.append(name)
                print(f"{name}\n    {problem}", flush=True)
    inputs, partial = len({pair.name for pair in chosen}), arguments.short or bool(arguments.only)
    figure = Figure(
        "hardening.7", "commands on bad models, tasks and files that end with one sentence and the right exit code",
        "all, of at least 120 pairs", tried - len(wrong), f"of {tried} pairs",
        not wrong and (partial or tried >= 120), tried,
        note=f"{inputs} bad inputs, {len({pair.command for pair in chosen})} commands, slowest {slowest:.1f} s",
    )  # fmt: skip
    return 0 if report(partial, figure) else 1


if __name__ == "__main__":
    sys.exit(main())
