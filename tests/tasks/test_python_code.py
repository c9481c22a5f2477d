"""Programs are found in completions, run against tests they never see, and cannot cheat their way to a reward."""

import itertools
import json
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Sequence
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench import sandbox as bench_sandbox
from offbeat.errors import SandboxError, SandboxMissing, TaskError
from offbeat.sandbox import Arguments, ProgramOutcome, SandboxLimits, open_sandbox
from offbeat.sandbox.driver import encode
from offbeat.tasks import python_code
from offbeat.tasks.code_tests import BadTest, Call, parse, same, wire
from offbeat.tasks.python_code import judge, passes, program_in
from offbeat.tasks.rewards import Reward, grade
from offbeat.tasks.task import make
from offbeat.types import Json, Unscorable
from tests.fixtures.attacks.sandbox_programs import CHEATS, Problem

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=4)
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tuple", "set", "dict", "bytes", "int", "x"]), inner, max_size=2)
    ),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def sandboxed() -> None:
    try:
        open_sandbox()
    except SandboxMissing as missing:
        pytest.skip(f"no sandbox: {missing}")


class Scripted:
    """A sandbox that returns prepared outcomes and records the time limits."""

    def __init__(self, *outcomes: ProgramOutcome) -> None:
        self.outcomes = list(outcomes)
        self.limits: list[SandboxLimits] = []

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        self.limits.append(limits)
        return self.outcomes.pop(0)

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        self.limits.append(limits)
        return self.outcomes.pop(0)


@given(VALUES)
def test_a_value_is_the_same_as_itself_on_the_wire(value: object) -> None:
    assert same(wire(value), wire(value))


@given(VALUES, VALUES)
def test_the_comparison_is_symmetric_apart_from_rounding(a: object, b: object) -> None:
    if same(wire(a), wire(b)) and encode(a) == encode(b):
        assert same(wire(b), wire(a))


@given(VALUES, JSON)
def test_anything_a_program_sends_is_compared_without_an_error(value: object, sent: Json) -> None:
    assert same(wire(value), sent) in (True, False)


@pytest.mark.parametrize(
    ("expected", "answer", "verdict"),
    [
        (1, 1.0, True),
        (1, True, False),
        (True, 1, False),
        (0, False, False),
        (None, False, False),
        (0, None, False),
        ("1", 1, False),
        (0.3, 0.1 + 0.2, True),
        (1.602e-19, 0.0, False),
        (1.602e-19, 1.6020000001e-19, True),
        (1e-12, 2e-12, False),
        (0.0, 1e-17, True),
        (0.0, 1e-8, False),
        (3, 2.9999999999, False),
        (1.0, 1.00001, False),
        (float("nan"), float("nan"), True),
        (float("inf"), 1e308 * 10, True),
        (2.0, 10**400, False),
        (10**400, 10**400, True),
        (10**400, 10**400 + 1, False),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        ({1: "a", 2: "b"}, {2: "b", 1.0: "a"}, True),
        ({1: "a"}, {True: "a"}, False),
        ({"a": [1.5, {2}]}, {"a": (1.5, frozenset({2}))}, True),
        (b"x", "x", False),
        ([[]], [()], True),
    ],
)
def test_which_values_count_as_the_same(expected: object, answer: object, verdict: bool) -> None:
    assert same(wire(expected), wire(answer)) is verdict


class LyingDict(dict[str, int]):
    def items(self) -> NoReturn:
        raise AssertionError

    __iter__ = __len__ = keys = items


class LyingList(list[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class LyingInt(int):
    __index__ = __int__ = lambda self: 7
    __repr__ = __format__ = __str__ = lambda *_: "7"  # type: ignore[assignment]


class Color(IntEnum):
    RED = 1


class Name(str):
    def __str__(self) -> str:
        return "lie"


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("answer", "base"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (defaultdict(int, a=2), {"a": 2}),
        ([Point(1, Color.RED)], [(1, 1)]),
        (Name("x"), "x"),
        ({"a": 1}.keys(), {"a"}),
        (OrderedDict(a=1).items(), {("a", 1)}),
        (LyingDict(a=1), {"a": 1}),
        (LyingList([1]), [1]),
        (LyingInt(3), 3),
        (LyingInt(1 << 70), 1 << 70),
    ],
)
def test_a_subclass_is_sent_as_its_base_and_none_of_its_code_runs(answer: object, base: object) -> None:
    assert same(wire(base), wire(answer)) and same(wire(answer), wire(base))


@pytest.mark.parametrize("answer", [range(3), {"a": 1}.values(), Fraction(1, 2), iter([1]), type])
def test_any_other_type_is_no_answer(answer: object) -> None:
    with pytest.raises(TypeError, match="the answer has type"):
        encode(answer)


def test_a_deeply_nested_answer_is_wrong_and_does_no_harm() -> None:
    deep: Json = 1
    for _ in range(990):
        deep = [deep]
    assert not same(wire({1}), {"set": [deep]})
    with pytest.raises(ValueError, match="nested deeper"):
        encode(deep)


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1)",
        "assert f(1) == g(2)",
        "assert f(x) == 1",
        "assert f(1) != 2",
        "print(1)",
        "assert f(1) == 1; import os",
        "assert f(**{'a': 1}) == 1",
        "not python",
        {"call": "f", "args": [1]},
        {"call": "f", "args": [1], "result": 1, "stdin": ""},
        {"stdin": "1"},
        {"stdin": "", "stdout": "é" * (1 << 19) + "\n"},
        7,
    ],
)
def test_a_test_that_cannot_be_used_is_an_error_in_the_data(test: Json) -> None:
    with pytest.raises(BadTest):
        parse([test])


def test_tests_are_read_from_assertions_and_from_json() -> None:
    assert parse(["assert f(1, k={2}) == (3,)"]) == [Call("f", ((1,), {"k": {2}}), {"tuple": [3]})]
    assert parse([{"call": "f", "args": [1], "kwargs": {"k": 2}, "result": None}]) == [
        Call("f", ((1,), {"k": 2}), None)
    ]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```Python3 title=x\na\n```\n", "a\n"),
        ("  ```py\n  a\n  ```", "  a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\nwas cut off", "was cut off"),
        ("```\na\n```", None),
        ("```pythonic\na\n```", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(text: str, program: str | None) -> None:
    assert program_in(text) == program


@pytest.mark.parametrize(
    "text",
    [
        "```python\n" * 20_000 + " " * 50_000,
        "```python\n" + " " * 199_000,
        "```python\n" + " " * 99_000 + "`" + " " * 99_000,
        "```python\n" + "\n ```x" * 40_000,
        " " * 199_000 + "```python\na",
        "```" + " " * 199_000,
        "`" * 200_000,
        "\n" * 200_000,
    ],
)
def test_hostile_fences_are_read_in_linear_time(text: str) -> None:
    began = time.process_time()
    program_in(text)
    assert time.process_time() - began < 1


def test_each_test_has_its_own_time_and_all_together_ten_times_as_much() -> None:
    for count, total in [(3, 24.0), (12, 80.0)]:
        tests = parse([{"stdin": "", "stdout": "1"}] * count)
        sandbox = Scripted(*[ProgramOutcome("finished", stdout=b"1", seconds=3.0, idle_seconds=1.0)] * count)
        assert judge("", tests, sandbox, SandboxLimits(seconds=8.0)).passed
        assert [limits.seconds for limits in sandbox.limits] == [8.0] * count
        assert [limits.total_seconds for limits in sandbox.limits] == [total - 3.0 * n for n in range(count)]
        assert [limits.idle_seconds for limits in sandbox.limits] == [20.0 - n for n in range(count)]


def test_the_first_failure_is_named() -> None:
    tests = parse(["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"])
    wrong = judge("", tests, Scripted(ProgramOutcome("finished", (1, 7, 3))), SandboxLimits())
    late = judge("", tests, Scripted(ProgramOutcome("timeout", (1,), detail="its time was up")), SandboxLimits())
    assert wrong.why == "test 2 of 3: a wrong answer"
    assert late.why == "test 2 of 3: timeout: its time was up"


def test_a_sandbox_that_fails_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: str) -> Scripted:
        raise SandboxError("out of slots")

    monkeypatch.setattr(python_code, "open_sandbox", broken)
    scored = grade([Reward(passes)], (0, 1), "```python\nx\n```", {"tests": ["assert f() == 1"]})
    assert isinstance(scored, Unscorable) and scored.reason == "sandbox"
    assert scored.detail.startswith("passes: SandboxError: out of slots")


def test_without_a_sandbox_the_task_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str) -> Scripted:
        raise SandboxMissing("bwrap is not installed; install it with: apt-get install bubblewrap")

    monkeypatch.setattr(python_code, "open_sandbox", missing)
    with pytest.raises(TaskError, match=r"does not start without a sandbox.*apt-get install bubblewrap"):
        make("python_code", {"source": "problems.jsonl"})


def test_a_problem_file_becomes_a_task_that_scores(sandboxed: None, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"text": "Write double(x).", "checks": ["assert double(2) == 4"]}))
    task = make("python_code", {"source": str(file), "prompt": "text", "tests": "checks", "seconds": 5.0})
    assert task.deadline > 12 * (10 * 5.0 + SandboxLimits.idle_seconds) + 200  # the sandbox decides before the pool
    [example] = list(task.examples)
    right, wrong = (f"```python\ndef double(x): return x {op} 2\n```" for op in ("*", "-"))
    assert task.rewards[0](right, example.record) == 1.0
    assert task.rewards[0](wrong, example.record) == 0.0


def test_a_bad_test_is_found_when_the_data_is_loaded(sandboxed: None, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"prompt": "p", "tests": ["assert double(2)"]}))
    with pytest.raises(TaskError, match=r"problems-0: .*is not of the form"):
        len(make("python_code", {"source": str(file)}).examples)


QUICK_CHEATS = [
    cheat for cheat in CHEATS if not any(word in cheat.name for word in ("hangs", "waits", "nested", "builtins"))
]


@pytest.mark.parametrize("cheat", QUICK_CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_scores_0(sandboxed: None, cheat: Problem) -> None:
    assert passes(cheat.completion, cheat.columns) == 0.0


@pytest.mark.engine
def test_the_whole_cheat_suite_scores_0(sandboxed: None) -> None:
    assert len(CHEATS) >= 20
    assert bench_sandbox.cheats(short=True)
