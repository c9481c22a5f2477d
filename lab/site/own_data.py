"""Train on data of one's own as a user would: from questions with answers in JSONL to a report.

    python -m lab.site.own_data    row door.7.own-data and docs/own-data-transcript.txt; 5 minutes

The model is SmolLM2-135M-Instruct, and the questions are sums in words. `--short` records nothing: it writes and checks
the configuration.
"""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.fixtures.processes import OFFBEAT
from lab.fixtures.smollm2 import directory as smollm2

TRANSCRIPT = ROOT / "docs" / "own-data-transcript.txt"
MODEL = "SmolLM2-135M-Instruct"
SMALL = (
    "steps=8 prompts_per_step=4 group_size=4 sampling.max_tokens=24 optimizer.learning_rate=5e-6 evaluation.prompts=16"
)
COMMANDS = (
    f"init own-data --data questions.jsonl --model {MODEL}",
    "check run.toml --set sampling.max_tokens=24",
    f"train run.toml --out runs/own {' '.join(f'--set {one}' for one in SMALL.split())}",
    "report runs/own",
)
MOST = 5


def write_questions(file: Path) -> None:
    """Write 100 questions under the names that people use, `question` and `answer`."""
    rows = ({"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(10) for b in range(10))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def follow(place: Path, commands: tuple[str, ...]) -> tuple[str, bool]:
    """Run the commands in a directory until one fails; return what a terminal shows, and whether all succeeded."""
    shown = f"$ head -n 2 questions.jsonl\n{''.join((place / 'questions.jsonl').open().readlines()[:2])}"
    for command in commands:
        begun = time.monotonic()
        done = subprocess.run([OFFBEAT, *command.split()], cwd=place, capture_output=True, text=True)
        shown += f"$ offbeat {command}\n{done.stdout}{done.stderr if done.returncode else ''}"
        shown += f"({time.monotonic() - begun:.0f} s)\n"
        if done.returncode:
            return shown, False
    return shown, True


def main() -> bool:
    short = command_parser(__doc__, short="write and check the configuration only").parse_args().short
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / MODEL).symlink_to(smollm2())
        write_questions(place / "questions.jsonl")
        shown, done = follow(place, COMMANDS[:2] if short else COMMANDS)
        written = short or (place / "runs" / "own" / "report.html").is_file()
    print(shown)
    if short:
        return done
    TRANSCRIPT.write_text(shown, encoding="utf-8")
    steps = len(re.findall(r"^step \d+/", shown, re.M))
    note = f"init, check, train, report; {steps} steps; {machine()}; docs/own-data-transcript.txt"
    return record(
        Figure("door.7.own-data", "commands from questions in JSONL to a report, none edited by hand", f"<= {MOST}",
               len(COMMANDS), "commands", done and written and len(COMMANDS) <= MOST, 1, note),
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(not main())
