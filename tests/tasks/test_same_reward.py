"""What a task file holds is compared with what was given: equal in a new process, or refused with the difference."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from offbeat.errors import TaskError
from offbeat.tasks import capture
from offbeat.tasks.capture import RewardFunction, write_task
from offbeat.tasks.rewards import Reward
from offbeat.tasks.same_reward import describe, differences
from offbeat.tasks.task import custom

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
BEGIN = (
    "import functools, math, re\nfrom pathlib import Path\nLIMIT = 3\ndef size(text):\n    return len(text) + LIMIT\n"
)
TAIL = """
from offbeat.errors import OffbeatError
from offbeat.tasks.capture import write_task
try:
    print(write_task(Path("task"), reward, [{"prompt": "1+1=", "answer": "2"}]).resolve(), reward("abc", {}))
except OffbeatError as error:
    print(f"refused: {error}")
"""


def of_a_script(source: str, place: Path, *command: str, begin: str = BEGIN) -> str:
    """Run a script that captures its reward, and return what it says."""
    (place / "script.py").write_text(begin + source + TAIL)
    run = [sys.executable, *(command or ["script.py"])]
    given = (place / "script.py").read_text()
    done = subprocess.run(run, cwd=place, input=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def elsewhere(file: str) -> str:
    code = "import sys; from offbeat.tasks.task import custom; print(custom(path=sys.argv[1]).rewards[0]('abc', {}))"
    return subprocess.run([sys.executable, "-c", code, file], cwd="/", capture_output=True, text=True).stdout.strip()


DIFFERENT = {
    "def reward(text, columns, k=2): return k * size(text)\nreward.__defaults__ = (5,)":
        "reward.__defaults__[0] is 5 here and 2 there",
    "def reward(text, columns): return size(text)\nsize.__code__ = (lambda text: 7).__code__":
        "the source of size cannot be found",
    "class A:\n    k = 2\ndef reward(text, columns): return A.k\nA.k = 5": "→ A.k is 5 here and 2 there",
    "class A:\n    k = 2\n    def f(self): return 1\ndef reward(text, columns): return A().f()\nA.f = lambda self: 7":
        "is '<lambda>' here and 'f' there",
    "def reward(text, columns): return math.floor(2.5)\nmath.floor = lambda number: 7": "math.floor",
    "def reward(text, columns): return math.pi\nmath.pi = 3": "→ math.pi is 3 here and 3.14",
    "import builtins\ndef reward(text, columns): return abs(7)\nbuiltins.abs = lambda n: 1": "→ abs is a function here",
    "def reward(text, columns): return size(text) * 2\n"
    "p = Path(__file__); p.write_text(p.read_text().replace('* 2', '* 3'))": "co_consts[1] is 2 here and 3 there",
    "def reward(text, columns):\n    return __name__ == '__main__'": "'__name__', which every task file has itself",
    "def reward(text, columns, k=functools.lru_cache): return 1\nreward.__kwdefaults__ = None; "
    "reward.__defaults__ = (object(),)": "__defaults__[0]",
    "def reward(text, columns):\n    import re\n    return re.escape(text) != re.sub('a', 'b', text)\n"
    "reward.__code__ = reward.__code__.replace(co_names=('re', 'sub', 'escape'))": "co_names[1] is 'sub' here",
    "def reward(text, columns): return len(text) > 2\n"
    "p = Path(__file__); p.write_text(p.read_text().replace('> 2', '< 2'))":
        "__code__.steps",
    "def reward(text, columns):\n    try:\n        return size(text)\n    finally:\n        size('')\n"
    "reward.__code__ = reward.__code__.replace(co_exceptiontable=b'')": "__code__.steps",
    "import textwrap\ntextwrap.dedent.extra = 3\ndef reward(text, columns): return textwrap.dedent.extra":
        "extra is 3 here and missing there",
    "@functools.singledispatch\ndef show(x): return 1\n@show.register\ndef _(x: str): return 2\n"
    "def reward(text, columns): return show(text)": "show is a functools.singledispatch function",
    "def make():\n    def even(n): return n == 0 or odd(n - 1)\n    def odd(n): return n != 0 and even(n - 1)\n"
    "    def reward(text, columns): return even(len(text))\n    return reward\nreward = make()":
        "odd and even call each other",
    "A = [1]; B = A\ndef reward(text, columns):\n    A.append(2)\n    return len(B)": "again here",
}  # fmt: skip


@pytest.mark.parametrize("source", DIFFERENT)
def test_what_the_source_does_not_tell_is_refused_with_the_difference(source: str, tmp_path: Path) -> None:
    said = of_a_script(source, tmp_path)
    assert said.startswith("refused") and DIFFERENT[source] in said, said
    assert "into a Python file" in said or "at the top level" in said


EQUAL = {
    "a closure with a counter": "def make(k):\n    n = 0\n    def reward(text, columns):\n        nonlocal n\n"
    "        n += 1\n        return k * size(text) + n\n    return reward\nreward = make(2)",
    "a decorator that hides what it decorates": "def twice(f):\n    def call(text, columns):\n"
    "        return 2 * f(text, columns)\n    return call\n@twice\ndef reward(text, columns):\n    return size(text)",
    "attributes": "def reward(text, columns):\n    return size(text) * reward.k\nreward.k = 3",
    "a cache": "@functools.lru_cache\ndef cached(text):\n    return size(text)\n"
    "def reward(text, columns):\n    return cached(text)",
    "values with a constructor": "SEEN, HERE = frozenset({'abc'}), [Path('a/b'), math.inf]\n"
    "def reward(text, columns):\n    return (text in SEEN) + len(HERE[0].parts)",
    "text over lines in a function": "def make():\n    def reward(text, columns):\n        return len('''a\n"
    "        b''')\n    return reward\nreward = make()",
    "a condition": "if LIMIT:\n    def reward(text, columns):\n        return size(text)\n",
    "a lambda in a function": "def make(k):\n    return lambda text, columns: k * size(text)\nreward = make(3)",
    "a class that calls its base": "class A:\n    def f(self, n): return n\nclass B(A):\n    def f(self, n):\n"
    "        return 1 + super().f(n)\n    def __call__(self, text, columns): return self.f(LIMIT)\nreward = B()",
    "an import in a function of what the script imports, too": "def reward(text, columns):\n    import re\n"
    "    found = 0\n    try:\n        for one in text:\n            found += 2 if re.search('[ab]', one) else 1\n"
    "            re.compile(5)\n"
    "    except TypeError:\n        return found + size(text)",
    "a variable with the name of an import of the task file": "def reward(text, columns):\n    json = {'a': 2.0}\n"
    "    return json.get('a')",
    "an enum after a library noted something on its base": "import enum\nclass Level(enum.Enum):\n    RIGHT = 1.0\n"
    "enum.Enum.__new__.noted = 'by torch'\ndef reward(text, columns):\n    return Level.RIGHT.value",
    "a recursive function in a function": "def make():\n    def inner(n): return n and 1 + inner(n - 1)\n"
    "    def reward(text, columns): return inner(5)\n    return reward\nreward = make()",
    "an output": "import sys\ndef reward(text, columns):\n    print('hello', file=sys.stderr)\n    return size(text)",
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_plain_reward_is_the_same_in_another_process(name: str, tmp_path: Path) -> None:
    file, reward = of_a_script(EQUAL[name], tmp_path).rsplit(" ", 1)
    assert Path(file).is_file(), file
    assert elsewhere(file) == reward


def test_annotations_that_are_not_evaluated_stay_so(tmp_path: Path) -> None:
    begin = "from __future__ import annotations\n" + BEGIN
    file, reward = of_a_script("def reward(text: Unknown, columns: dict):\n    return size(text)", tmp_path,
                               begin=begin).rsplit(" ", 1)  # fmt: skip
    assert elsewhere(file) == reward == "6"


def test_a_script_from_standard_input_is_told_to_use_a_file(tmp_path: Path) -> None:
    said = of_a_script("def reward(text, columns):\n    return size(text)", tmp_path, "-")
    assert said == (
        "refused: the source of reward cannot be found, so scoring processes cannot load it; put it into a Python file "
        "and import it"
    )


def test_cells_of_a_notebook_are_captured_as_they_were_run(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = [
        BEGIN,
        "def reward(text, columns):\n    return size(text)",
        "def size(text):\n    return 10 * len(text)",
        "@functools.wraps(reward)\ndef again(text, columns):\n    return reward(text, columns) + 1",
        TAIL,
        "size.__defaults__ = (7,)" + TAIL.replace('"task"', '"other"'),
    ]
    code = (
        "import json, sys; from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "for cell in json.load(sys.stdin): shell.run_cell(cell, store_history=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, input=json.dumps(cells), capture_output=True, text=True,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )  # fmt: skip
    first, second = done.stdout.strip().splitlines()
    assert elsewhere(first.split()[0]) == "30" == first.split()[1]
    assert "size.__defaults__" in second and second.startswith("refused")


def test_a_random_reward_is_compared_by_its_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_SESSIONS", {__name__})
    assert len(custom(path=str(write_task(tmp_path, dice, ROWS))).rewards) == 1


def dice(text: str, columns: object) -> float:
    return random.random()


CALLS: list[str] = []


def counted(text: str, columns: object) -> float:
    CALLS.append(text)
    return float(len(CALLS))


def slow(text: str, columns: object) -> float:
    time.sleep(60)
    return 1.0


def test_the_comparison_changes_nothing_here_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_SESSIONS", {__name__})
    monkeypatch.setattr("offbeat.tasks.same_reward.CALL_SECONDS", 0.2)
    began = time.monotonic()
    write_task(tmp_path, [counted, slow], ROWS)
    assert not CALLS and time.monotonic() - began < 30


def test_a_reward_that_differs_in_its_results_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_SESSIONS", {__name__})
    SimpleNamespaceState.patched = 7  # the state of a library, which is described by its type
    with pytest.raises(TaskError, match=r"scores of of_state for .* is \[7.0,"):
        write_task(tmp_path, of_state, ROWS)


class SimpleNamespaceState:
    patched = 1


def of_state(text: str, columns: object) -> float:
    import tests.tasks.test_same_reward as here

    return here.SimpleNamespaceState.patched


def test_a_reward_whose_file_does_not_load_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once.py").write_text("from pathlib import Path\nPath(__file__).with_name('key').unlink()\n"
                                      "def reward(text, columns):\n    return 1.0\n")  # fmt: skip
    (tmp_path / "key").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    from once import reward  # type: ignore[import-not-found]

    with pytest.raises(TaskError, match="does not load there: FileNotFoundError"):
        write_task(tmp_path / "task", reward, ROWS)


@dataclass
class Rule:
    limit: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1], (1,)), (1, 1.0), (1, True), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ("1", b"1"),
        (Rule(1), Rule(2)), (Rule, type("Rule", (), {})), (lambda x: x + 1, lambda x: x + 2), (at := [1], [at]),
        ("x" * 1000, "x" * 999 + "y"), (range(3), range(4)), (Path("a"), Path("b")), ({1}, {2}),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    ],
)  # fmt: skip
def test_descriptions_tell_apart_what_differs(one: object, other: object) -> None:
    assert [*differences(describe(one), describe(other), "it")]
    assert not [*differences(describe(one), describe(one), "it")]


def test_what_refers_to_itself_has_a_description() -> None:
    loop: list[object] = []
    loop.append(loop)
    module = ModuleType("loop")
    module.loop = module  # type: ignore[attr-defined]
    assert describe(loop) == {"": "a list", "[0]": "object 0 again"}
    assert "loop" in str(describe(module, frozenset({"loop"})))


@pytest.mark.parametrize(
    "given",
    ["JUDGE_KEY = 'c0ffee00c0ffee00'", "PASSWORD: str = 'opensesame'", "SETTING = {'token': 'c0ffee00c0ffee00'}",
     "SETTING = 'ghp_0123456789abcdefghij'", "pw = 'c0ffee'", "db_pwd: str = 'c0ffee-1'", "SETTING = {'pwd': 'c0ffee'}",
     "passphrase = 'opensesame and more'", "PGPASS = 'opensesame'", "SETTING = 'postgresql://me:c0ffee@localhost/db'",
     "SETTING = 'eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c0ffee'", "SETTING = 'Basic dXNlcjpwYXNzd29yZA=='",
     "SETTING = 'https://hooks.slack.com/services/T0/B0/c0ffee'", "SETTING = 'AIzaSyA-abcdefghijklmnopqrstuvwc0ffee1'",
     "import os; SETTING = os.environ['OF_DB_PW']", "import os; SETTING = os.environ['OF_A_TOKEN']"],
)  # fmt: skip
def test_a_secret_is_refused_and_not_shown(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OF_A_TOKEN", "OF_DB_PW"):
        monkeypatch.setenv(variable, "not to be seen")
    name = given.split()[2 if given.startswith("import") else 0].strip(":")
    said = of_a_script(f"{given}\ndef reward(text, columns):\n    return len({name})", tmp_path)
    assert said.startswith("refused") and 'os.environ["NAME"]' in said
    assert not any(one in said for one in ("c0ffee", "opensesame", "ghp_", "dXNl", "not to be seen"))
    assert not (tmp_path / "task").exists()


@pytest.mark.parametrize(
    "given",
    ["ANSWER_KEY = 'final_answer'", "PAD_TOKEN = '<|endoftext|>'", "SECRET = 'swordfish'", "pwd = '/home/me/run1'",
     "pw = 'pairwise'", "TOPIC = 'Basic LinearAlgebra'", "LINK = 'http://localhost:8000/a@b'", "ppw = 'number1'",
     "LINK = '://[^:]+:[^@]+@'", "LINK = 'http://%s:%s@host'", "passphrase_count = 'several'"],
)  # fmt: skip
def test_an_ordinary_constant_is_no_secret(given: str, tmp_path: Path) -> None:
    said = of_a_script(f"{given}\ndef reward(text, columns):\n    return len({given.split()[0]})", tmp_path)
    assert not said.startswith("refused"), said


def test_declared_files_are_kept_with_their_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("one")
    given: RewardFunction = Reward(dice, files=["words.txt"])
    assert custom(path=str(write_task(tmp_path / "task", given, ROWS))).rewards[0].files == [
        str(tmp_path / "words.txt")
    ]
