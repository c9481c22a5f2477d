"""`python_code`: write a program that passes tests. The program runs in a sandbox only.

The reward is 1 if every test passes, else 0. A program that is wrong, crashes, exceeds its CPU or memory, or floods
its output has failed and scores 0. If the sandbox itself fails, it raises `SandboxError` and the completion gets no
score. `code_tests.py` says how tests are written and answers compared, `sandbox/` why answers cannot be faked.
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
from offbeat.tasks.data import ColumnMap, Deferred, Example, Messages, evaluation_rows, load
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json

INSTRUCTION: Final = "Answer with one Python program in a ```python block, complete with its imports."
_FENCE: Final = "```"
_LINE: Final = re.compile(r"[^\n]*\n|[^\n]+")
_LANGUAGE: Final = re.compile(r"[ \t]*(\w*)")
_LANGUAGES: Final = {"python", "python3", "py"}
_LONGEST: Final = 200_000
"""Only so many characters at the end of a completion are searched for a program."""
_MOST_TESTS: Final = 10
"""All tests of a program together may use this many times the CPU limit of one test."""
_ALLOWANCE, _PATIENCE = 600.0, 15.0
"""The pool waits longer than the sandbox, which decides: so many seconds, and so many times the CPU limit."""


@dataclass(frozen=True)
class TestVerdict:
    """Whether a program passes all tests, and which test failed first."""

    passed: bool
    why: str = ""


def program_in(text: str) -> str | None:
    """Return the last ```python block of a completion, or None if there is none.

    >>> program_in("First\\n```python\\nx = 1\\n```\\nno:\\n```python\\nx = 2\\n```\\nDone.")
    'x = 2\\n'
    >>> program_in("It is 42.") is None
    True
    """
    blocks = [body for language, body in _blocks(text[-_LONGEST:]) if language in _LANGUAGES]
    return blocks[-1] if blocks else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each fenced block, line by line: a pattern took minutes on long runs of spaces."""
    language, body = None, list[str]()
    for line in _LINE.findall(text):
        marked = line.strip(" \t\n")
        if language is None:
            if marked.startswith(_FENCE) and line.endswith("\n"):
                found = _LANGUAGE.match(marked, len(_FENCE))
                language, body = found[1].lower() if found else "", []
        elif marked == _FENCE:
            yield language, "".join(body)
            language = None
        else:
            body.append(line)
    if language is not None:  # the end of the text closes the block
        yield language, "".join(body)


def judge(program: str, tests: Sequence[Call | Script], sandbox: Sandbox, limits: SandboxLimits) -> TestVerdict:
    """Run a program against tests until one fails. `limits.seconds` is for each test, and gives `total_seconds`."""
    done, cpu, idle = 0, limits.seconds * min(len(tests), _MOST_TESTS), limits.idle_seconds
    for batch in _batches(tests):
        outcome = _run_batch(program, batch, sandbox, replace(limits, total_seconds=cpu, idle_seconds=idle))
        passed = _count_passed(batch, outcome)
        if passed < len(batch):
            wrong = passed < len(outcome.answers) or outcome.ending == "finished"
            why = "a wrong answer" if wrong else f"{outcome.ending}: {outcome.detail}"
            return TestVerdict(False, f"test {done + passed + 1} of {len(tests)}: {why}")
        done += len(batch)
        cpu, idle = cpu - outcome.seconds, idle - outcome.idle_seconds
    return TestVerdict(True)


def _batches(tests: Sequence[Call | Script]) -> Iterator[list[Call | Script]]:
    """Group the tests by sandbox: consecutive calls of one function share one, and every script has its own."""
    for _, batch in groupby(enumerate(tests), key=lambda at: at[1].function if isinstance(at[1], Call) else at[0]):
        yield [test for _, test in batch]


def _run_batch(program: str, batch: Sequence[Call | Script], sandbox: Sandbox, limits: SandboxLimits) -> ProgramOutcome:
    first = batch[0]
    if isinstance(first, Script):
        return sandbox.run(program, first.stdin.encode(), limits)
    calls = [test.arguments for test in batch if isinstance(test, Call)]
    return sandbox.call(program, first.function, calls, limits)


def _count_passed(batch: Sequence[Call | Script], outcome: ProgramOutcome) -> int:
    """Count the tests that pass before the first failure. Only here do expected results meet answers."""
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
    """Return 1 if the program in a completion passes all tests in the column 'tests', else 0."""
    tests = parse(columns["tests"])
    program = program_in(text)
    if program is None:
        return 0.0
    return float(judge(program, tests, open_sandbox(sandbox), SandboxLimits(seconds, memory_mb)).passed)


def examples(problems: Iterable[Example], instruction: str = INSTRUCTION) -> list[Example]:
    """Add the instruction to each problem and validate its tests, so that a broken test is found on loading.

    >>> [problem] = examples([Example("double", "Write double(x).", {"tests": ["assert double(2) == 4"]})])
    >>> print(problem.prompt[-1]["content"])
    Write double(x).
    <BLANKLINE>
    Answer with one Python program in a ```python block, complete with its imports.
    """
    instructed = []
    for example in problems:
        try:
            parse(example.columns["tests"])
        except BadTest as error:
            raise TaskError(f"{example.id}: {error}") from error
        instructed.append(replace(example, prompt=_add_instruction(example.prompt, instruction)))
    return instructed


def _add_instruction(prompt: str | Messages, instruction: str) -> Messages:
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
    """Make the task; `TaskError` if no sandbox works on this machine.

    `source`, `split` and `subset` are those of `data.load`; evaluation asks the `test` split, if there is one.

    Args:
        prompt: The column with the problem.
        tests: The column with its tests; see `code_tests.py`.
        seconds: CPU of a program for one test; for all tests together, up to ten times as much.
        memory_mb: Memory of a program for all its processes together.
        sandbox: 'bubblewrap', 'bubblewrap-without-cgroups', or 'module:factory' for a hosted one.
    """
    try:
        open_sandbox(sandbox)
    except SandboxMissing as missing:
        raise TaskError(f"task 'python_code' does not start without a sandbox: {missing}") from missing
    columns = ColumnMap(prompt=prompt, keep={"tests": tests})

    def test_examples() -> list[Example]:
        found = enumerate(evaluation_rows(source, split=split, subset=subset))
        return examples(columns.example(row, f"python_code-test-{number}") for number, row in found)

    return Task(
        "python_code",
        Deferred(lambda: examples(load(source, columns, split=split, subset=subset).examples)),
        (Reward(partial(passes, seconds=seconds, memory_mb=memory_mb, sandbox=sandbox)),),
        deadline=_ALLOWANCE + _PATIENCE * _MOST_TESTS * seconds,
    ).evaluated_on(test_examples)
