"""Add a gate, an engine, a sink and a task to a copy of the source, train with all four, and count the files touched.

    python -m lab.house.adding          seconds; writes rows rooms.6.*

Each is registered by its name, as the built-in ones are. (A user names a file of their own instead, and touches none.)
The run trains two steps; its reward, its engine, its gate and its sink each leave a trace that is checked.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from tests.fixtures.tiny_model import save_model


@dataclass(frozen=True)
class Edit:
    """Text that goes into a file, in front of a line that stands there once. Without a line: a new file."""

    file: str
    text: str
    before: str = ""


GATE = (
    Edit(
        "objective/spec.py",
        '@dataclass(frozen=True)\nclass Upper:\n    """Stops tokens with a ratio above `limit`."""\n\n'
        "    limit: float = 2.0\n\n\n",
        "@dataclass(frozen=True)\nclass CentredBand:",
    ),
    Edit("objective/spec.py", "Upper | ", "CentredBand | SecondMoment | TensorFunction"),
    Edit("objective/losses.py", "Upper, ", "TwoSide,\n"),
    Edit(
        "objective/losses.py",
        "        case Upper(limit):\n            print('gate: upper')\n            return ratios_NT <= limit\n",
        "        case TwoSide(low, high):",
    ),
    Edit("config/axes.py", "Upper, ", "TwoSide,\n"),
    Edit("config/axes.py", '"upper": Upper, ', '"ring": Ring'),
)
ENGINE = (
    Edit(
        "rollout/counted.py",
        '"""An engine of transformers that says what it is asked for."""\n\n'
        "from offbeat.rollout.hf import HfEngine\n\n\n"
        "class CountedEngine(HfEngine):\n"
        "    async def generate(self, requests):\n"
        "        print('engine: counted')\n"
        "        return await super().generate(requests)\n\n\n"
        "def start(config, place):\n"
        "    return CountedEngine.start(config.model.directory(), dtype=config.model.serve)\n",
    ),
    Edit("config/parts.py", '    "counted": EngineKind("offbeat.rollout.counted:start"),\n', '    "vllm": EngineKind('),
)
SINK = (
    Edit(
        "run/sinks/lines.py",
        '"""A sink that prints."""\n\n\n'
        "class Lines:\n"
        "    def __init__(self, run):\n"
        "        print('sink: lines')\n\n"
        "    def write(self, step, values): ...\n"
        "    def show(self, step, samples): ...\n"
        "    def close(self): ...\n",
    ),
    Edit("config/parts.py", '    "lines": SinkKind("offbeat.run.sinks.lines:Lines"),\n', '    "prometheus": '),
)
TASK = (
    Edit(
        "tasks/digits.py",
        '"""A task: write at least two digits."""\n\n'
        "from offbeat.tasks.rewards import Reward\n"
        "from offbeat.tasks.task import Example, Task\n\n\n"
        "def two_digits(text, columns):\n"
        "    return float(sum(character.isdigit() for character in text) >= 2)\n\n\n"
        "def digits():\n"
        "    print('task: digits')\n"
        "    return Task('digits', [Example(str(n), f'{n}+1=') for n in range(64)], (Reward(two_digits),))\n",
    ),
    Edit("tasks/task.py", '    "digits": "offbeat.tasks.digits:digits",\n', '    "custom": '),
)
PARTS = {"gate": GATE, "engine": ENGINE, "sink": SINK, "task": TASK}
SEEN = {"gate": "gate: upper", "engine": "engine: counted", "sink": "sink: lines", "task": "task: digits"}
"""What the run prints when it uses a part."""
MOST = {"gate": 3, "engine": 2, "sink": 2, "task": 2}
"""Files that a part may touch: its own and the list that names it; for a gate what it is, its rule and its name."""

CONFIG = """
steps = 2
prompts_per_step = 4
group_size = 4
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
engine.kind = "counted"
sampling.max_tokens = 5
objective = {{ preset = "rec-oneside-nois", gate = {{ kind = "upper", limit = 1.5 }}, zero_variance_mask = false }}
task = {{ name = "digits", scorers = 1 }}
run.sinks = ["lines"]
"""


def add(edit: Edit, package: Path) -> None:
    """Make an edit in a copy of the package."""
    file = package / edit.file
    text = file.read_text(encoding="utf-8") if edit.before else ""
    if text.count(edit.before) != 1 and edit.before:
        raise ValueError(f"{edit.file} has {edit.before!r} {text.count(edit.before)} times: change this command")
    file.write_text(text.replace(edit.before, edit.text + edit.before) if text else edit.text, encoding="utf-8")


def train_with_all() -> str:
    """Train in a copy of the source that has all four parts, and return what it printed."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for edit in (edit for edits in PARTS.values() for edit in edits):
            add(edit, root / "src" / "offbeat")
        (root / "model").mkdir()
        save_model(root / "model")
        (root / "run.toml").write_text(CONFIG.format(model=root / "model"), encoding="utf-8")
        command = [sys.executable, "-c", "from offbeat.cli.main import main; main()", "train", "run.toml"]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return done.stdout


def main() -> bool:
    """Add all four, train, and record how many files each touched."""
    printed = train_with_all()
    figures = []
    for part, edits in PARTS.items():
        files = sorted({edit.file for edit in edits})
        used = SEEN[part] in printed
        holds = used and len(files) <= MOST[part]
        note = ", ".join(files) + ("" if used else "; the run did not use it")
        goal = f"≤ {MOST[part]}"
        figures.append(Figure(f"rooms.6.{part}", f"files that adding a {part} touches", goal, len(files), "files",
                              holds, 1, note))  # fmt: skip
    return record(*figures)


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    sys.exit(not main())
