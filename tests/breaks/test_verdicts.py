"""Ways to get around a reward by making the scoring fail, and a right answer that paid for its grader's bug."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.experience.log import ExperienceLog
from offbeat.scoring.pool import ScoringPool
from offbeat.scoring.tally import TooManyFailures
from offbeat.tasks.task import make
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unscorable

WAIT = 120.0
COLUMNS = {"prompt": "6*7=", "answer": "42"}
LONG = "a" * 5_000
WAYS = {
    "a file name that is too long": ("open('/tmp/offbeat-no-such-place/' + text) if text != '42' else None", LONG),
    "too long for a program": ("__import__('subprocess').run(['true', text])", "a" * 3_000_000),
    "a host that does not answer": (
        "__import__('socket').create_connection(('127.0.0.1', 1)) if text == 'http://127.0.0.1:1' else None",
        "http://127.0.0.1:1",
    ),
    "waiting": ("__import__('time').sleep(float(text) / 1e5)", "9999999"),
    "waiting for a program": ("__import__('subprocess').run(['sleep', text.replace('4', '0.0')])", "99"),
    "a limit of its own": ("__import__('subprocess').run(['sleep', '0' + text[2:]], timeout=0.1)", "009"),
    "the process killed": ("__import__('os').kill(__import__('os').getpid(), 9) if text == 'die' else None", "die"),
}


def task_file(place: Path, body: str, head: str = "") -> str:
    file = place / "graded.py"
    file.write_text(f"import math\nexamples = []\n{head}\ndef reward(text, columns):\n    {body}\n")
    return str(file)


def pool_for(place: Path, body: str, head: str = "") -> ScoringPool:
    task = make(task_file(place, body, f"deadline = 1.0\n{head}"))
    return ScoringPool.of(task, workers=1)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_fails_as_a_machine_would_gets_the_lowest_reward(way: str, tmp_path: Path) -> None:
    body, text = WAYS[way]
    with pool_for(tmp_path, f"{body}; return float(text == '42')") as pool:
        assert [one.reward for one in pool.score_all([("42", COLUMNS)] * 30)] == [1.0] * 30  # type: ignore[union-attr]
        outcome = pool.score(text, COLUMNS).result(timeout=WAIT)
    assert isinstance(outcome, Score) and outcome.reward == 0.0 and outcome.fault, outcome


def test_an_answer_for_which_no_reward_applies_while_others_have_one_gets_the_lowest_reward(tmp_path: Path) -> None:
    with pool_for(tmp_path, "return float(text == '42') if text.isdigit() else None") as pool:
        outcomes = pool.score_all([("42", COLUMNS), ("41", COLUMNS), ("who knows", COLUMNS)])
    assert [one.reward for one in outcomes if isinstance(one, Score)] == [1.0, 0.0, 0.0]


def test_a_policy_cannot_end_a_run_by_answers_that_fail(tmp_path: Path) -> None:
    with pool_for(tmp_path, "open('/tmp/' + text if len(text) > 99 else '/dev/null').close(); return 0.5") as pool:
        try:
            outcomes = pool.score_all([("short", COLUMNS)] * 20 + [(LONG, COLUMNS)] * 100)
        except TooManyFailures as ended:
            pytest.fail(f"answers that fail end the run: {ended}")
    assert len(outcomes) == 120 and all(isinstance(one, Score) for one in outcomes)


@pytest.mark.parametrize("text", ["42", "The answer is 42"])
def test_a_right_answer_that_makes_its_grader_fail_does_not_get_the_lowest_reward(text: str, tmp_path: Path) -> None:
    body = "return -math.log10(abs(float(text.split()[-1]) - float(columns['answer'])))"
    with pool_for(tmp_path, body, "reward_range = (-9.0, 9.0)") as pool:
        pool.score_all([(one, COLUMNS) for one in ("41", "40", "42.5", "39")])
        right, dodge = pool.score_all([(text, COLUMNS), ("no number", COLUMNS)])
    assert isinstance(right, Unscorable) and "right answer" in right.detail, right
    assert isinstance(dodge, Score) and dodge.reward == -9.0


def rates(place: Path, scores: list[Score | Unscorable]) -> list[float]:
    """Return pass@1 with its interval as `offbeat eval` shows it, for 20 prompts with these scores each."""
    with ExperienceLog.open(place) as log:
        log.append(
            [
                Group(
                    f"g{prompt}",
                    Prompt(id=f"p{prompt}", token_ids=[1, prompt], task="sums"),  # type: ignore[arg-type]
                    tuple(
                        Completion(f"g{prompt}/{i}", [4, i], UNKNOWN, source="human", score=score)  # type: ignore[arg-type]
                        for i, score in enumerate(scores)
                    ),
                )
                for prompt in range(20)
            ]
        )
    (task := place.parent / "sums.py").write_text("examples = []\ndef reward(text, columns):\n    return 0.0\n")
    command = [sys.executable, "-m", "offbeat", "eval", str(place), "--task", str(task)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if re.search(r"\ball\b|\bsums\b", line))
    cells = re.findall(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]", row)
    return [float(one) for one in cells[1]]  # after the mean reward


def test_pass_at_1_counts_answers_that_caused_that_they_have_no_score_as_wrong(tmp_path: Path) -> None:
    dodged = Unscorable("crash", "by the answer: reward: OSError: File name too long")
    value, low, high = rates(tmp_path / "log", [Score(1.0), dodged, dodged, dodged])
    assert math.isclose(value, 0.25) and low < 0.25 < high < 0.6


def test_pass_at_1_has_bounds_if_the_grader_could_not_score_answers(tmp_path: Path) -> None:
    failed = Unscorable("timeout", "the service did not answer")
    _, low, high = rates(tmp_path / "log", [Score(1.0), failed, failed, failed])
    assert low < 0.25 and high == 1.0
