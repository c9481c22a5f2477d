"""Honest programs beside six kinds of load: none may score 0, and no verdict may change from try to try.

    python -m lab.attacks.honest_programs            1,000 programs three times; a quarter of an hour on two cores;
                                                     continues after the programs that are done,
                                                     which it keeps in /tmp; writes row trust.3
    python -m lab.attacks.honest_programs --short    48 programs once, a minute; records nothing

The programs are generated: recursion, strings, scripts with standard input, threads, a little sleep, the standard
library, and some that use half of the CPU limit of a test, measured on the quiet machine. They have 1 to 200 tests. A
pool of the task `python_code` scores four at a time beside one kind of load; in each try a program meets another kind.
A false zero is a reward of 0, or a failure that was blamed on the answer. No score counts as a changed verdict.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lab.attacks.starvation import ATTACKS
from lab.figures import Figure, command_parser, commit, machine, report
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.python_code import python_code
from offbeat.types import Json, Score
from tests.fixtures.attacks.sandbox_programs import Problem

SECONDS = 1.0
"""The CPU limit of a test."""
PROGRAMS = 1_000
TRIES = 3
AT_ONCE = 4
HALF = "half of the limit"
_EAT_MEMORY = "held = []\nwhile True: held.append(bytearray(1 << 20))"
_SPIN = "while True: pass"


def _calls(function: str, answer: Callable[[int], Json], arguments: list[int]) -> list[Json]:
    return [{"call": function, "args": [one], "result": answer(one)} for one in arguments]


def _count(rng: random.Random) -> int:
    """Return a number of tests from 1 to 200."""
    return rng.choice([1, 2, 3, 5, 10, 20, 50, 100, 200])


def _recursion(rng: random.Random) -> tuple[str, list[Json]]:
    step = rng.randrange(1, 9)
    code = f"def down(n):\n    return 0 if n <= 0 else {step} + down(n - 1)"
    return code, _calls("down", lambda n: n * step, [rng.randrange(600) for _ in range(_count(rng))])


def _strings(rng: random.Random) -> tuple[str, list[Json]]:
    shift = rng.randrange(1, 25)
    code = f"def turn(n):\n    return ''.join(chr(97 + (ord(c) - 48 + {shift}) % 26) for c in str(n))[::-1].upper()"

    def turn(n: int) -> str:
        return "".join(chr(97 + (int(c) + shift) % 26) for c in str(n))[::-1].upper()

    return code, _calls("turn", turn, [rng.randrange(10**12) for _ in range(_count(rng))])


def _library(rng: random.Random) -> tuple[str, list[Json]]:
    code = (
        "import collections, decimal, fractions, heapq, itertools, json, math, re, statistics\n"
        "def digits(n):\n    found = collections.Counter(re.findall('[0-9]', json.dumps(n)))\n"
        "    return heapq.nlargest(2, ((count, digit) for digit, count in found.items()))"
    )

    def digits(n: int) -> Json:
        found = Counter(str(n))
        return [[count, digit] for count, digit in sorted(((c, d) for d, c in found.items()), reverse=True)[:2]]

    return code, _calls("digits", digits, [rng.randrange(10**9) for _ in range(_count(rng))])


def _threads(rng: random.Random) -> tuple[str, list[Json]]:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\ndef squares(n):\n"
        "    with ThreadPoolExecutor(8) as pool:\n        return sum(pool.map(lambda x: x * x, range(n)))"
    )
    count = min(_count(rng), 20)
    return code, _calls("squares", lambda n: sum(x * x for x in range(n)), [rng.randrange(40) for _ in range(count)])


def _sleep(rng: random.Random) -> tuple[str, list[Json]]:
    code = (
        "import asyncio\nasync def later(n):\n    await asyncio.sleep(0.002)\n    return n + 1\n"
        "def f(n):\n    return asyncio.run(later(n))"
    )
    return code, _calls("f", lambda n: n + 1, [rng.randrange(99) for _ in range(min(_count(rng), 50))])


def _script(rng: random.Random, count: int = 0) -> tuple[str, list[Json]]:
    code = "import sys\nnumbers = list(map(int, sys.stdin.read().split()))\nprint(sum(numbers), max(numbers))"
    tests: list[Json] = []
    for _ in range(count or rng.choice([1, 1, 2, 3, 5])):
        numbers = [rng.randrange(1_000) for _ in range(rng.randrange(1, 50))]
        tests.append({"stdin": " ".join(map(str, numbers)), "stdout": f"{sum(numbers)} {max(numbers)}\n"})
    return code, tests


def _work(loops: int) -> str:
    return f"def work(n):\n    total = 0\n    for i in range({loops}):\n        total += i & n\n    return n"


def loops_of_half_a_limit() -> int:
    """Return how many loops take half of a test's CPU limit here, now."""
    namespace: dict[str, Callable[[int], int]] = {}
    exec(_work(1_000_000), namespace)  # what is timed is what the program does
    times = []
    for _ in range(5):
        began = time.process_time()
        namespace["work"](7)
        times.append(time.process_time() - began)
    return int(1_000_000 * SECONDS / 2 / min(times))


KINDS = [_recursion, _strings, _library, _threads, _sleep, _script]


def problems(count: int, loops: int) -> list[Problem]:
    """Generate the programs: the same ones each time, but for the number of loops."""
    made = []
    for number in range(count):
        rng = random.Random(number)
        name, kind = f"{number}", KINDS[number % len(KINDS)]
        code, tests = kind(rng)
        if number % 40 == 7:
            name, code = f"{number}: {HALF}", _work(loops)
            tests = _calls("work", lambda n: n, list(range(rng.choice([1, 1, 2, 4]))))
        elif number % 200 == 11:
            name, (code, tests) = f"{number}: 200 scripts", _script(rng, 200)
        made.append(Problem(name, f"```python\n{code}\n```", tests))
    return made


_LOADS = {
    "CPU": [_SPIN] * 3,
    "memory bandwidth": ["a, b = bytearray(1 << 26), bytearray(1 << 26)\nwhile True: a[:] = b; b[:] = a"] * 2,
    "process creation": ["import subprocess\nwhile True: subprocess.run(['/bin/true'])"] * 2,
    "disk": [
        "import os, tempfile\nwith tempfile.NamedTemporaryFile(dir='/tmp') as file:\n    while True:\n"
        "        os.pwrite(file.fileno(), os.urandom(1 << 22), 0); os.fsync(file.fileno())"
    ]
    * 2,
    "trainer": [
        "import torch\ntorch.set_num_threads(2)\nlayers = [torch.nn.Linear(768, 768) for _ in range(4)]\n"
        "model = torch.nn.Sequential(*layers)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "while True:\n    optimizer.zero_grad(); model(torch.randn(256, 768)).square().mean().backward()\n"
        "    optimizer.step()"
    ],
    "hostile sandboxes": [],
}


@contextmanager
def load(kind: str, pool: ScoringPool) -> Iterator[None]:
    """Keep a load running while the block runs. Hostile programs go through the same pool and the same slots."""
    over = threading.Event()

    def attack(offset: int) -> None:
        hostile = [*ATTACKS.values(), _EAT_MEMORY, _SPIN]
        for program in itertools.islice(itertools.cycle(hostile), offset, None):
            if over.is_set():
                return
            pool.score(f"```python\n{program}\n```", {"tests": [{"stdin": "", "stdout": "1"}]}).result()

    with ExitStack() as stack:
        threads = [threading.Thread(target=attack, args=(3 * n,)) for n in range(2 if not _LOADS[kind] else 0)]
        for program in _LOADS[kind]:
            environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"}
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", program], env=environment))
            stack.callback(process.kill)
        for thread in threads:
            thread.start()
        time.sleep(5.0 if kind == "trainer" else 1.0)  # until it has started
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def beside_loads(chosen: list[Problem], tries: int, file: Path) -> dict[str, list[str]]:
    """Score every program in every try beside one of the loads. Return its endings by name; the file keeps them."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["try"], row["program"]): row["ending"] for row in rows}
    source = file.with_suffix(".problems")
    source.write_text("".join(json.dumps({"prompt": one.name, "tests": one.tests}) + "\n" for one in chosen))
    task = python_code(source=str(source), seconds=SECONDS)
    with ScoringPool.of(task, workers=AT_ONCE + 2) as pool, file.open("a") as kept:

        def score(problem: Problem, attempt: int, kind: str) -> None:
            outcome = pool.score(problem.completion, problem.columns, of=problem.name).result()
            passed = isinstance(outcome, Score) and outcome.reward == 1.0
            done[attempt, problem.name] = ending = "passed" if passed else f"beside {kind}: {outcome}"
            kept.write(json.dumps({"try": attempt, "program": problem.name, "ending": ending}) + "\n")
            kept.flush()

        for attempt, (place, kind) in itertools.product(range(tries), enumerate(_LOADS)):
            part = [one for n, one in enumerate(chosen) if (n // len(KINDS) + n + attempt) % len(_LOADS) == place]
            left = [one for one in part if (attempt, one.name) not in done]
            began = time.monotonic()
            if left:
                with load(kind, pool), ThreadPoolExecutor(AT_ONCE) as threads:
                    list(threads.map(lambda one, a=attempt, k=kind: score(one, a, k), left))
            failed = [done[attempt, one.name] for one in part if done[attempt, one.name] != "passed"]
            print(f"try {attempt}, {kind}: {len(failed)} of {len(part)}, {time.monotonic() - began:.0f} s", *failed[:3])
            sys.stdout.flush()
    return {one.name: [done[attempt, one.name] for attempt in range(tries)] for one in chosen}


def main() -> bool:
    parser = command_parser(__doc__, short="48 programs once")
    short = parser.parse_args().short
    chosen = problems(48 if short else PROGRAMS, loops_of_half_a_limit())
    tries = 1 if short else TRIES
    with tempfile.TemporaryDirectory() as place:
        kept = Path(tempfile.gettempdir(), f"offbeat-honest-programs-{commit()}.jsonl")
        endings = beside_loads(chosen, tries, Path(place, "short.jsonl") if short else kept)
    zeros = [ending for of in endings.values() for ending in of if "Score(reward=0.0" in ending]
    changed = [name for name, of in endings.items() if any(ending != "passed" for ending in of)]
    half = sum(HALF in one.name for one in chosen)
    return report(
        short,
        Figure(
            "trust.3",
            "false zeros among honest programs with 1 to 200 tests beside six kinds of load",
            "0, verdicts identical over three tries",
            f"{len(zeros)} false zeros, {len(changed)} programs with another verdict",
            "programs",
            not changed,
            len(chosen) * tries,
            f"{len(chosen)} programs, {tries} tries, {AT_ONCE} at a time beside {', '.join(_LOADS)}; {half} of them "
            f"use half of a test's CPU limit of {SECONDS:g} s; {machine()}",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
