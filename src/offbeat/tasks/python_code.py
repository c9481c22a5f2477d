"""`python_code`: write a program that passes tests. The program is model-written and runs in a sandbox only.

1 where every test passes, else 0. A program that is wrong, crashes, runs over its time or memory, or floods its output
has failed: that is the model's doing, and scores 0. A sandbox that fails raises `SandboxError`, and the completion has
no score. How tests are written and answers compared: `code_tests.py`; why answers cannot be faked: `sandbox.py`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Final

from offbeat.errors import SandboxMissing, TaskError
from offbeat.sandbox import ProgramOutcome, Sandbox, SandboxLimits, open_sandbox
from offbeat.tasks.code_tests import BadTest, Call, Script, parse, same, same_output
from offbeat.tasks.data import ColumnMap, Deferred, load
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Example, Messages, Task
from offbeat.types import Json

INSTRUCTION: Final = "Answer with one Python program in a ```python block, complete with its imports."
_BLOCK: Final = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_LANGUAGES: Final = {"python", "python3", "py"}
_LONGEST: Final = 200_000
"""Characters of a completion that are looked at, from its end."""
_START_ALLOWANCE: Final = 60.0
"""Seconds that starting sandboxes may take on a crowded machine before the completion is given up as Unscorable."""


@dataclass(frozen=True)
class TestVerdict:
    """Whether a program passes, and where it failed."""

    passed: bool
    why: str = ""


def program_in(text: str) -> str | None:
    """The last ```python block of a completion; None where there is none.

    >>> program_in("First\\n```python\\nx = 1\\n```\\nno:\\n```python\\nx = 2\\n```\\nDone.")
    'x = 2\\n'
    >>> program_in("It is 42.") is None
    True
    """
    blocks = [body for language, body in _BLOCK.findall(text[-_LONGEST:]) if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else None


def judge(program: str, tests: Sequence[Call | Script], sandbox: Sandbox, limits: SandboxLimits) -> TestVerdict:
    """Run a program against tests, up to the first that fails. They share the time limit."""
    done, left = 0, limits.seconds
    for batch in _batches(tests):
        outcome = _attempt(program, batch, sandbox, replace(limits, seconds=max(left, 0.0)))
        passed = _passed(batch, outcome)
        if passed < len(batch):
            wrong = passed < len(outcome.answers) or outcome.ending == "finished"
            why = "a wrong answer" if wrong else f"{outcome.ending}: {outcome.detail}"
            return TestVerdict(False, f"test {done + passed + 1} of {len(tests)}: {why}")
        done += len(batch)
        left -= outcome.seconds
    return TestVerdict(True)


def _batches(tests: Sequence[Call | Script]) -> Iterator[list[Call | Script]]:
    """Calls of one function in a row share a sandbox; every script has its own."""
    for _, batch in groupby(enumerate(tests), key=lambda at: at[1].function if isinstance(at[1], Call) else at[0]):
        yield [test for _, test in batch]


def _attempt(program: str, batch: Sequence[Call | Script], sandbox: Sandbox, limits: SandboxLimits) -> ProgramOutcome:
    first = batch[0]
    if isinstance(first, Script):
        return sandbox.run(program, first.stdin.encode(), limits)
    calls = [test.arguments for test in batch if isinstance(test, Call)]
    return sandbox.call(program, first.function, calls, limits)


def _passed(batch: Sequence[Call | Script], outcome: ProgramOutcome) -> int:
    """How many tests pass before the first that does not. Expected results meet answers here, and only here."""
    if isinstance(batch[0], Script):
        return int(outcome.ending == "finished" and same_output(batch[0].stdout, outcome.stdout))
    pairs = zip((test for test in batch if isinstance(test, Call)), outcome.answers, strict=False)
    return sum(1 for _ in takewhile(lambda pair: same(pair[0].expected, pair[1]), pairs))


def passes(
    text: str,
    columns: Mapping[str, Json],
    *,
    seconds: float = SandboxLimits.seconds,
    memory_mb: int = SandboxLimits.memory_mb,
    sandbox: str = "bubblewrap",
) -> float:
    """1 where the program in a completion passes all tests of the column 'tests'. For options see `python_code`."""
    tests = parse(columns["tests"])
    program = program_in(text)
    if program is None:
        return 0.0
    return float(judge(program, tests, open_sandbox(sandbox), SandboxLimits(seconds, memory_mb)).passed)


def examples(given: Iterable[Example], instruction: str = INSTRUCTION) -> list[Example]:
    """Problems with the instruction added, their tests checked: a test that cannot be used is found now.

    >>> [problem] = examples([Example("double", "Write double(x).", {"tests": ["assert double(2) == 4"]})])
    >>> print(problem.prompt[-1]["content"])
    Write double(x).
    <BLANKLINE>
    Answer with one Python program in a ```python block, complete with its imports.
    """
    found = []
    for example in given:
        try:
            parse(example.columns["tests"])
        except BadTest as error:
            raise TaskError(f"{example.id}: {error}") from error
        found.append(replace(example, prompt=_instructed(example.prompt, instruction)))
    return found


def _instructed(prompt: str | Messages, instruction: str) -> Messages:
    *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return (*before, {**last, "content": f"{last['content']}\n\n{instruction}"})


def python_code(
    *,
    source: str,
    prompt: str = "prompt",
    tests: str = "tests",
    split: str = "train",
    subset: str | None = None,
    seconds: float = SandboxLimits.seconds,
    memory_mb: int = SandboxLimits.memory_mb,
    sandbox: str = "bubblewrap",
) -> Task:
    """Programming problems with tests. Refuses to start where there is no sandbox.

    Args:
        source: A .jsonl or .parquet file, a saved dataset, or a dataset's name on the hub.
        prompt: The column with the problem.
        tests: The column with its tests; see `code_tests.py`.
        split: Of a dataset that has splits.
        subset: A dataset's configuration on the hub.
        seconds: Wall clock for a program, all its tests together.
        memory_mb: Memory for a program, all its processes together.
        sandbox: 'bubblewrap', 'bubblewrap-without-cgroups', or 'module:factory' for a hosted one.
    """
    try:
        open_sandbox(sandbox)
    except SandboxMissing as missing:
        raise TaskError(f"task 'python_code' does not start without a sandbox: {missing}") from missing
    columns = ColumnMap(prompt=prompt, keep={"tests": tests})
    return Task(
        "python_code",
        Deferred(lambda: examples(load(source, columns, split=split, subset=subset).examples)),
        (Reward(partial(passes, seconds=seconds, memory_mb=memory_mb, sandbox=sandbox)),),
        deadline=seconds + _START_ALLOWANCE,
    )
