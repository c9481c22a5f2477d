"""A reward captured from a script is the one that was given, or it is refused; it is private, and its inputs are known.

Most tests run real scripts in processes of their own and compare rewards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.run.journal import FileJournal, record_failure
from offbeat.tasks.rewards import Reward, grade
from offbeat.types import Unscorable

SCRIPT = """
import functools, json, math
import random  # takes `floor` before a script changes it
from pathlib import Path

LIMIT = 5

def value(text):
    return math.floor(len(text) / 2) + LIMIT

{reward}

from offbeat.errors import OffbeatError
from offbeat.tasks.capture import write_task
try:
    said = {{"file": str(write_task(Path("task"), reward, [{{"prompt": "1+1=", "answer": "2"}}]).resolve())}}
except OffbeatError as error:
    said = {{"refused": str(error)}}
said["rewards"] = [reward(text, {{}}) for text in ("alpha", "a", "quick brown")]
print(json.dumps(said))
"""
LOAD = """
import json, sys
from offbeat.tasks.task import custom
reward = custom(path=sys.argv[1]).rewards[0]
print(json.dumps([reward(text, {}) for text in ("alpha", "a", "quick brown")]))
"""
PLAIN = "def reward(text, columns, k=2):\n    return k * value(text) + 0.125\n"
GRADER = "class Grader:\n    k = 2\n    def __call__(self, text, columns):\n        return self.k * value(text)\n"
GRADER += "def reward(text, columns):\n    return Grader()(text, columns)\n"
CHANGED = {
    "defaults": PLAIN + "reward.__defaults__ = (7,)",
    "a helper's code": PLAIN + "value.__code__ = (lambda text: 7).__code__",
    "an attribute": "def reward(text, columns):\n    return reward.k * value(text)\nreward.k = 7",
    "a class attribute": GRADER + "Grader.k = 7",
    "a method": GRADER + "Grader.__call__ = lambda self, text, columns: 7.5",
    "a library": PLAIN + "math.floor = math.ceil",
    "the file": PLAIN + "p = Path(__file__); p.write_text(p.read_text().replace('0.125', '7.5'))",
    "the lines above": PLAIN
    + "p = Path(__file__); p.write_text(p.read_text().replace('math.floor(', '3 * math.floor('))",
    "an own module": "import helper\ndef reward(text, columns):\n    return helper.size(text)\nhelper.LIMIT = 7",
    "an own file": "import helper\nfrom helper import reward\np = Path('helper.py')\n"
    "p.write_text(p.read_text().replace('LIMIT = 3', 'LIMIT = 7'))",
}
HELPER = "LIMIT = 3\ndef size(text):\n    return len(text) * LIMIT\ndef reward(text, columns):\n    return size(text)\n"


def captured(place: Path, reward: str, **environment: str) -> dict[str, object]:
    """Run a script that writes the task, and return what it says: the file, or why there is none."""
    (place / "helper.py").write_text(HELPER)
    (place / "script.py").write_text(SCRIPT.format(reward=reward))
    command, variables = [sys.executable, "script.py"], {**os.environ, **environment}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True, env=variables)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CHANGED)
def test_a_reward_that_its_source_does_not_tell_is_captured_as_it_is_or_refused(name: str, tmp_path: Path) -> None:
    said = captured(tmp_path, CHANGED[name])
    if "file" in said:
        command = [sys.executable, "-c", LOAD, str(said["file"])]
        loaded = subprocess.run(command, cwd="/", capture_output=True, text=True)
        assert loaded.stdout.strip() == json.dumps(said["rewards"]), "another reward, without a word"
    else:
        assert "refused" in said


@pytest.mark.parametrize(
    "reward",
    [
        "KEY = 'sk-0123456789abcdef0123'\ndef reward(text, columns):\n    return len(KEY)",
        "def reward(text, columns, api_key='0a1b2c3d4e5f6071'):\n    return len(api_key)",
        "import os\nsetting = os.environ['JUDGE_TOKEN']\ndef reward(text, columns):\n    return len(setting)",
    ],
)
def test_a_secret_is_not_written_into_the_run_directory(reward: str, tmp_path: Path) -> None:
    secrets = ("sk-0123456789abcdef0123", "0a1b2c3d4e5f6071", "correct horse battery")
    said = captured(tmp_path, reward, JUDGE_TOKEN="correct horse battery")
    task = tmp_path / "task"
    texts = [path.read_text() for path in (task.rglob("*") if task.exists() else []) if path.is_file()]
    assert not [one for one in secrets for text in texts if one in text]
    assert not [one for one in secrets if one in str(said.get("refused"))], "the message does not show it either"


def asks_a_judge(text: str, columns: object) -> float:
    raise ValueError(f"401 for https://judge.example.com/v1?api_key=c0ffee0123456789 with {text}")


def returns_the_error(text: str, columns: object) -> Unscorable:
    return Unscorable("crash", "401 for {'Authorization': 'Bearer sk-c0ffee0123456789'}")


@pytest.mark.parametrize("reward", [asks_a_judge, returns_the_error])
def test_a_secret_in_the_error_of_a_reward_reaches_no_log(reward: Callable[..., object]) -> None:
    outcome = grade([Reward(reward)], (0, 1), "two", {})
    assert isinstance(outcome, Unscorable) and "401 for" in outcome.detail and "c0ffee" not in outcome.detail


def test_a_secret_in_the_error_that_ends_a_run_reaches_no_record(tmp_path: Path) -> None:
    seen: list[object] = []
    path = tmp_path / "events.jsonl"
    with (
        pytest.raises(ValueError, match="c0ffee"),
        FileJournal(path, listener=seen.append) as journal,
        record_failure(journal, lambda: 7),
    ):
        asks_a_judge("two", {})
    assert "api_key=*** with two" in path.read_text() and "c0ffee" not in f"{path.read_text()} {seen}"


def test_what_is_written_of_a_reward_is_private(tmp_path: Path) -> None:
    said = captured(tmp_path, PLAIN)
    folder = Path(str(said["file"])).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir() if path.is_file()} == {
        "reward.py": "0o600",
        "examples.jsonl": "0o600",
    }


RESUME = """
import json, sys
from pathlib import Path
from offbeat.config import parse
from offbeat.errors import RunError
from offbeat.run.directory import RunDirectory
try:
    from offbeat.run.directory import digest_inputs, require_same_inputs
except ImportError:  # where an earlier version has them
    from offbeat.run.inputs import digest_inputs, require_same_inputs
config, directory = parse({"task": {"name": "task.py"}}), RunDirectory(Path("run"))
place = directory.checkpoints / "step-00000003"
if not place.exists():
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(json.dumps({"extras": {"inputs": digest_inputs(config)}}))
try:
    require_same_inputs(directory, config)
    print("resumes")
except RunError as error:
    print(error)
"""


def test_a_resume_sees_that_an_own_module_of_the_reward_has_changed(tmp_path: Path) -> None:
    task = "import sys\nsys.path.insert(0, '.')\nfrom rules import reward\nexamples = [{'prompt': 'one'}]\n"
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "__init__.py").write_text(
        "from .numbers import LIMIT\ndef reward(text, columns):\n    return LIMIT\n"
    )

    def said(limit: int) -> str:
        (tmp_path / "rules" / "numbers.py").write_text(f"LIMIT = {limit}\n")
        run = [sys.executable, "-B", "-c", RESUME]
        return subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert said(3) == "resumes" and said(3) == "resumes"
    assert "rules.numbers changed" in said(4)
