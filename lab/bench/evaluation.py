"""Check TRL's reward functions and a user's task in the scoring pool, and `offbeat eval` and `offbeat score` as typed.

python -m lab.bench.evaluation             about a minute; writes rows tasks.6.* and tasks.7.*
python -m lab.bench.evaluation --short     fewer groups; records nothing
"""

import asyncio
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lab.figures import ROOT, Figure, command_parser, report
from offbeat.experience.log import ExperienceLog
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.data import tokens
from offbeat.tasks.rewards import from_trl
from offbeat.tasks.task import custom
from offbeat.types import Completion, Group, Score, VersionSpan
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.tiny_model import load_tokenizer, save_model
from tests.fixtures.trl_rewards import CASES, Case

PASS_RATE = 0.4
GROUP = 8


def unchanged(case: Case) -> bool:
    """Return True if the pool gives each completion the reward that it gets when TRL calls the function."""
    expected = case.function(**case.batch())
    if inspect.iscoroutine(expected):
        expected = asyncio.run(expected)
    with ScoringPool([from_trl(case.function)], workers=1) as pool:
        outcomes = pool.score_all(zip(case.texts, case.records, strict=True))
    found = [outcome.reward if isinstance(outcome, Score) else None for outcome in outcomes]
    print(f"{case.function.__name__}: called as by TRL {expected}, in the pool {found}")
    return found == expected


def custom_task(place: Path) -> tuple[int, bool]:
    """Return the number of lines of the task in the docs, and whether it scores."""
    page = (ROOT / "docs" / "how-to" / "bring-a-reward.md").read_text(encoding="utf-8")
    found = re.search(r"```py\n# rhymes.py\n(.*?)```", page, re.DOTALL)
    assert found, "docs/how-to/bring-a-reward.md shows no rhymes.py"
    file = place / "rhymes.py"
    file.write_text(found[1])
    task = custom(path=str(file))
    record_ = task.examples[0].record
    with ScoringPool.of(task, workers=1) as pool:
        outcomes = pool.score_all([("night", record_), ("nothing at all", record_)])
    return len(found[1].splitlines()), outcomes == [
        Score(1.0, {"rhymes": 0.9, "short": 0.1}),
        Score(0.0, {"rhymes": 0.0, "short": 0.0}),
    ]


def fill(place: Path, groups: int) -> tuple[int, float, float]:
    """Write a log of arithmetic with some wrong scores. Return how many are wrong, the stored mean and the true one."""
    rng = np.random.default_rng(6)
    tokenizer = load_tokenizer(place / "model")
    task = arithmetic()
    made, stored_right, right, altered = [], 0, 0, 0
    for number in range(groups):
        example = task.examples[number]
        answer = int(str(example.columns["answer"]))
        completions = []
        for i in range(GROUP):
            correct = bool(rng.random() < PASS_RATE)
            wrong = bool(rng.random() < 0.05)
            stored_right, right, altered = stored_right + (correct != wrong), right + correct, altered + wrong
            ids = tokenizer.encode(str(answer if correct else answer + 1 + i))
            span = (VersionSpan(number // 50, 0, len(ids)),)
            stored = Score(float(correct != wrong))
            logprobs = np.full(len(ids), -0.5, np.float32)
            completions.append(Completion(f"g{number}/{i}", np.array(ids), logprobs, span, score=stored))
        prompt = task.prompt(example, tokens(example.prompt, tokenizer))
        made.append(Group(f"g{number}", prompt, tuple(completions)))
    with ExperienceLog.open(place / "experience") as log:
        assert len(log.append(made).accepted) == groups
    return altered, stored_right / (groups * GROUP), right / (groups * GROUP)


def offbeat(*arguments: str) -> str:
    """Return what the command prints."""
    command = [OFFBEAT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


def interval(table: str, column: str) -> tuple[float, float, float]:
    """Return the value and the interval in the first row of a table."""
    lines = [
        [cell.strip() for cell in re.split("[│┃]", line)] for line in table.splitlines() if re.search("[│┃]", line)
    ]
    value, low, high = re.findall(r"\d\.\d+", lines[1][lines[0].index(column)])
    return float(value), float(low), float(high)


def commands(place: Path, groups: int) -> list[Figure]:
    """Run `eval` on a log and on a model, and `score` on the log."""
    save_model(place / "model")
    altered, rate, truth = fill(place, groups)
    log, tokenizer = str(place / "experience"), str(place / "model")
    stored = offbeat("eval", log, "--task", "arithmetic", "--tokenizer", tokenizer, "--k", "4", "--slice", "version")
    value, low, high = interval(stored, "pass@1")
    settings = ["--set", "digits=1", "--prompts", "24", "--samples", "8", "--max-tokens", "2"]
    model = offbeat("eval", str(place / "model"), "--task", "arithmetic", *settings)
    model_value, model_low, model_high = interval(model, "pass@8")
    again = offbeat("score", log, "--task", "arithmetic", "--tokenizer", tokenizer, "--write")
    appended = re.search(r"(\d+) late scores appended", again)
    changed = int(appended[1]) if appended else 0
    after, _, _ = interval(offbeat("eval", log, "--task", "arithmetic"), "pass@1")
    covers = abs(value - rate) < 5e-4 and low < value < high
    return [
        Figure(
            "tasks.7.log",
            f"offbeat eval on {groups} stored groups of {GROUP}: pass@1 with its interval",
            f"printed, around the {rate:.3f} that was stored",
            f"{value:.3f} [{low:.3f}, {high:.3f}]",
            "pass@1",
            covers,
            groups,
        ),
        Figure(
            "tasks.7.model",
            "offbeat eval on a tiny model of random weights, one-digit sums: pass@8 with its interval",
            "printed",
            f"{model_value:.3f} [{model_low:.3f}, {model_high:.3f}]",
            "pass@8",
            model_low <= model_value <= model_high,
            24,
        ),
        Figure(
            "tasks.7.score",
            "wrong stored scores that offbeat score --write finds and replaces",
            f"{altered}; then pass@1 = {truth:.3f}, the truth",
            changed,
            "completions",
            changed == altered and abs(after - truth) <= 6e-4,  # printed to three places
            groups * GROUP,
            f"pass@1 {value:.3f} before, {after:.3f} after",
        ),
    ]


def main() -> bool:
    short = command_parser(__doc__, short="fewer groups; record nothing").parse_args().short
    same = sum(unchanged(case) for case in CASES)
    with tempfile.TemporaryDirectory() as directory:
        lines, scores = custom_task(Path(directory))
        rows = commands(Path(directory), 20 if short else 200)
    rows += [
        Figure(
            "tasks.6.trl",
            "reward functions written as TRL documents them that give the same rewards in the pool, unchanged",
            f"{len(CASES)} of {len(CASES)}",
            same,
            "functions",
            same == len(CASES),
            sum(len(case.texts) for case in CASES),
            "plain text, chats, columns, None, token ids, async; called with one completion at a time",
        ),
        Figure(
            "tasks.6.custom", "lines of the custom task in the docs", "<= 30", lines, "lines", scores and lines <= 30, 1
        ),
    ]
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main())
