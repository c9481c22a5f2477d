"""A task from objects of a session: its file holds all that a scoring process needs, and nothing of the session."""

import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from offbeat.errors import DataError, TaskError
from offbeat.tasks import capture
from offbeat.tasks.capture import RewardFunction, write_task
from offbeat.tasks.rewards import Reward, grade
from offbeat.tasks.task import custom
from offbeat.types import Score

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
SCRIPT = """
import math, re
import re as regex
from collections.abc import Sequence as Many
from pathlib import Path
from offbeat.tasks.capture import write_task

LIMIT = 3
DIGITS = re.compile(r"[0-9]+", re.ASCII)
model = open(__file__)  # what a scoring process cannot have, and the reward does not use

def normalize(text: str) -> str:
    found = DIGITS.search(text)
    return found[0][:LIMIT] if found else ""

class Grader:
    best = 1.0
    def __call__(self, text, answer):
        model = normalize(text)
        return self.best if model == answer else math.floor(0.5)

def correct(completions: Many, answer, **columns):
    grader = Grader()
    return [grader(regex.sub(" ", "", text), expected) for text, expected in zip(completions, answer)]

def lonely(text, columns):
    return float(normalize(text) == columns["answer"])

file = write_task(Path("task"), [correct, lonely], [{"prompt": "1+1=", "answer": "2"}], reward_range=(0, 2))
"""


def reward(text: str, columns: dict[str, object]) -> float:
    return float(text == columns["answer"])


def test_a_reward_of_a_script_is_written_with_all_that_it_uses(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)
    written = tmp_path / "task" / "correct.py"
    assert "open(" not in written.read_text().replace(".open(", "") and "write_task" not in written.read_text()
    code = (
        "from offbeat.tasks.task import custom; from offbeat.tasks.rewards import grade\n"
        f"task = custom(path={str(written)!r}); row = task.examples[0].record\n"
        "print(task.name, [grade(task.rewards, task.reward_range, text, row).reward for text in ('a 2', '3')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "correct [2.0, 0.0]"


def test_a_reward_of_an_own_module_is_imported_from_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "rewards.py").write_text(
        "state = object()\ndef good(text, columns):\n    return state and 1.0\n"
    )
    code = (
        "from pathlib import Path; from mine.rewards import good; from offbeat.tasks.capture import write_task\n"
        "print(write_task(Path('task'), good, ['one', 'two']))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    loaded = "from offbeat.tasks.task import custom; print(custom(path=r'%s').rewards[0]('', {}))"
    command = [sys.executable, "-c", loaded % (tmp_path / "task" / "good.py")]
    assert subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip() == "1.0"


def test_a_dataset_comes_in_many_forms(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for number, dataset in enumerate([ROWS, tuple(ROWS), file, str(file), Dataset.from_list(ROWS)]):
        task = custom(path=str(write_task(tmp_path / str(number), reward, dataset)))
        assert [one.record for one in task.examples] == ROWS
    both = DatasetDict(train=Dataset.from_list(ROWS[:1]), test=Dataset.from_list(ROWS[1:]))
    path = write_task(tmp_path / "splits", reward, both)
    assert [one.record for one in custom(path=str(path)).examples] == ROWS[:1]
    assert json.loads(path.with_name("evaluation_examples.jsonl").read_text()) == ROWS[1]


def test_what_cannot_be_written_is_refused_with_a_reason(tmp_path: Path) -> None:
    judge = threading.Lock()

    def judged(text: str, columns: object) -> float:
        return float(judge is not None)

    typed = eval("lambda text, columns: 1.0")
    for rewards, rows, says in [
        (judged, ROWS, "judged uses 'judge', a lock, which a scoring process cannot get from here"),
        (Keeper(judge), ROWS, "Keeper uses 'held', a lock"),
        (partial(at_least_of, held=judge), ROWS, "at_least_of uses 'held', a lock"),
        (typed, ROWS, "the source of a lambda cannot be found"),
        ([], ROWS, "give at least one"),
        ("correct", ROWS, "'correct' is neither the directory of a model"),
        (7, ROWS, "is not a function"),
    ]:
        with pytest.raises(TaskError, match=says):
            write_task(tmp_path / "task", rewards, rows)  # type: ignore[arg-type]
    for rows, says in [([], "no rows"), (7, "dataset is a int"), ([7], "row 0"), ([{"prompt": object()}], "row 0"),
                       ({"test": ROWS}, "no split 'train'")]:  # fmt: skip
        with pytest.raises(DataError, match=says):
            write_task(tmp_path / "task", reward, rows)


def test_a_function_as_trl_documents_it_needs_no_wrapper(tmp_path: Path) -> None:
    def brief(completions: list[str], **kwargs: object) -> list[float]:
        return [1.0 if len(text) < 5 else 0.0 for text in completions]

    task = custom(path=str(write_task(tmp_path, brief, ["a question"])))
    assert [grade(task.rewards, (0, 1), text, {"prompt": "a question"}) for text in ("four", "fifth")] == [
        Score(1.0, {"brief": 1.0}),
        Score(0.0, {"brief": 0.0}),
    ]


def test_a_factory_of_rewards_keeps_the_variables_of_the_function_that_was_made(tmp_path: Path) -> None:
    task = custom(path=str(write_task(tmp_path, at_most(3), ROWS)))
    assert [task.rewards[0](text, {}) for text in ("abc", "abcd")] == [1.0, 0.0]


def test_one_name_for_two_things_is_refused_instead_of_scored_wrongly(tmp_path: Path) -> None:
    two = [Reward(at_most(3), name="three"), Reward(at_most(5), name="five")]
    with pytest.raises(TaskError, match="two different things called 'short'; rename one"):
        write_task(tmp_path / "functions", two, ROWS)
    task = custom(path=str(write_task(tmp_path / "values", [at_most(3), at_least(5)], ROWS)))
    assert [one("abcd", {}) for one in task.rewards] == [0.0, 0.0], "each keeps its own limit"


def test_names_of_the_task_file_itself_are_refused_in_a_reward(tmp_path: Path) -> None:
    def known(text: str, columns: object) -> float:
        return float(text in examples)

    with pytest.raises(TaskError, match="'examples', which every task file has itself; rename yours"):
        write_task(tmp_path, known, ROWS)


examples = ["one"]
LENGTHS = {"short": lambda text, columns: float(len(text) < 4), "long": lambda text, columns: float(len(text) > 4)}


@dataclass(frozen=True)
class AtLeast:
    limit: int
    pattern: re.Pattern[str] = re.compile("b+")

    def __call__(self, completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) >= self.limit and bool(self.pattern.search(text))) for text in completions]

    def plain(self, text: str, columns: object) -> float:
        return self([text])[0]


class Keeper:
    def __init__(self, held: object) -> None:
        self.held = held

    def __call__(self, text: str, columns: object) -> float:
        return float(self.held is not None)


class Awaited:
    limit = 4

    async def __call__(self, completions: list[str], answer: list[str], **columns: object) -> list[float]:
        return [float(len(text) >= self.limit) for text in completions]


def at_least_of(text: str, columns: object, held: object = 4) -> float:
    return float(len(text) >= held)  # type: ignore[operator]


def at_least_first(limit: int, text: str, columns: object) -> float:
    return float(len(text) >= limit)


FORMS: dict[str, RewardFunction] = {
    "a lambda": lambda text, columns: float(len(text) >= 4 and DIGITS.search(text) is None),
    "a lambda in a dictionary": LENGTHS["long"],
    "a TRL lambda": lambda completions, **_: [float(len(text) >= 4) for text in completions],
    "a lambda that takes a column": lambda answer, **columns: [float(len(t) >= 4) for t in columns["completions"]],
    "a dataclass": AtLeast(4),
    "a method": AtLeast(4).plain,
    "an async object": Awaited(),
    "a partial with keywords": partial(at_least_of, held=4),
    "a partial with positions": partial(at_least_first, 4),
    "a partial of a partial of an object": partial(partial(AtLeast(4)), limit=None),
}
DIGITS = re.compile("[0-9]")


@pytest.mark.parametrize("name", FORMS)
def test_a_reward_is_captured_in_whatever_form_it_comes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a session: nothing can be imported from the module that defines it."""
    monkeypatch.setattr(capture, "_SESSIONS", {__name__})
    written = write_task(tmp_path, FORMS[name], ROWS)
    code = (
        "from offbeat.tasks.task import custom; from offbeat.scoring.pool import ScoringPool\n"
        f"task = custom(path={str(written)!r}); row = task.examples[0].record\n"
        "with ScoringPool.of(task, workers=1) as pool:\n"
        "    print([outcome.reward for outcome in pool.score_all([('abbbbb', row), ('a', row)])])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.stdout.strip() == "[1.0, 0.0]", done.stderr + written.read_text()


def test_two_lambdas_have_two_names(tmp_path: Path) -> None:
    two: list[RewardFunction] = [lambda text, columns: 0.25, lambda text, columns: 0.5]
    task = custom(path=str(write_task(tmp_path, two, ROWS)))
    assert grade(task.rewards, (0, 1), "", {}) == Score(0.75, {"reward": 0.25, "reward_2": 0.5})


def at_most(limit: int) -> RewardFunction:
    def short(text: str, columns: object) -> float:
        return float(len(text) <= limit)

    return short


def at_least(limit: int) -> RewardFunction:
    def long(text: str, columns: object) -> float:
        return float(len(text) >= limit)

    return long
