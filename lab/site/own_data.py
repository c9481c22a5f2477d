"""Train on data of one's own as a user would: from questions with answers in JSONL to a report.

    python -m lab.site.own_data --model sums     with the tiny model of the learning evidence, 1 minute
    python -m lab.site.own_data                  with SmolLM2-135M-Instruct and vLLM, 5 minutes

Either writes row door.7.own-data and docs/own-data-transcript.txt. `--short` records nothing: it writes and checks the
configuration.
"""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.fixtures.smollm2 import directory as smollm2
from lab.learning.model import directory as sums
from tests.fixtures.processes import OFFBEAT

TRANSCRIPT = ROOT / "docs" / "own-data-transcript.txt"
MOST = 5
"""Commands that the way may have."""


@dataclass(frozen=True)
class Example:
    """A model, the questions that it is asked, and what makes its run short on two cores."""

    model: str
    directory: Callable[[], Path]
    question: str
    settings: str

    @property
    def commands(self) -> tuple[str, ...]:
        small = " ".join(f"--set {one}" for one in self.settings.split())
        return (
            f"init own-data --data questions.jsonl --model {self.model}",
            f"check run.toml {small}",
            f"train run.toml --out runs/own {small}",
            "report runs/own",
        )

    def write_questions(self, file: Path) -> None:
        """Write 100 questions under the names that people use, `question` and `answer`."""
        rows = ({"question": self.question.format(a, b), "answer": str(a + b)} for a in range(10) for b in range(10))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


EXAMPLES = {
    "smollm2": Example(
        "SmolLM2-135M-Instruct", smollm2, "What is {} plus {}?",
        "steps=8 prompts_per_step=4 group_size=4 sampling.max_tokens=24 optimizer.learning_rate=5e-6"
        " evaluation.prompts=16",
    ),
    "sums": Example("tiny-sums", sums, "{}+{}=", "steps=20 optimizer.learning_rate=4e-4 evaluation.every=10"),
}  # fmt: skip


def follow(place: Path, commands: Sequence[str]) -> tuple[str, bool]:
    """Run the commands in a directory until one fails; return what a terminal shows, and whether all succeeded."""
    questions = (place / "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    shown = f"$ head -n 2 questions.jsonl\n{''.join(questions[:2])}"
    for command in commands:
        begun = time.monotonic()
        done = subprocess.run([OFFBEAT, *command.split()], cwd=place, capture_output=True, text=True)
        shown += f"$ offbeat {command}\n{done.stdout}{done.stderr if done.returncode else ''}"
        shown += f"({time.monotonic() - begun:.0f} s)\n"
        if done.returncode:
            return shown, False
    return shown, True


def main() -> bool:
    parser = command_parser(__doc__, short="write and check the configuration only")
    parser.add_argument("--model", choices=EXAMPLES, default="smollm2", help="the model that is trained")
    asked = parser.parse_args()
    example = EXAMPLES[asked.model]
    commands = example.commands[:2] if asked.short else example.commands
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / example.model).symlink_to(example.directory())
        example.write_questions(place / "questions.jsonl")
        shown, done = follow(place, commands)
        written = (place / "runs" / "own" / "report.html").is_file()
    print(shown)
    if asked.short:
        return done
    TRANSCRIPT.write_text(shown, encoding="utf-8")
    steps = len(re.findall(r"^step \d+/", shown, re.M))
    note = f"init, check, train, report; {example.model}, {steps} steps; {machine()}; docs/own-data-transcript.txt"
    return record(
        Figure("door.7.own-data", "commands from questions in JSONL to a report, no file edited by hand",
               f"<= {MOST}", len(commands), "commands", done and written and len(commands) <= MOST, 1, note),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(not main())
