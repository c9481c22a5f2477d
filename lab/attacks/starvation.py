"""Honest programs and scorers beside programs that take everything they can get.

    python -m lab.attacks.starvation            1,000 honest programs beside five attacks, with and without control
                                                groups; an hour on two cores; writes rows hardening.1*
    python -m lab.attacks.starvation --short    a few of each; records nothing

Two attackers run all the time in slots of their own, on CPU, memory bandwidth, process ids and file handles. Beside
them, four honest programs at a time are scored, right ones and wrong ones. Each must get the verdict that it gets on a
quiet machine: a right program that scores 0, or any program without a score, counts as changed. Afterwards no process
of a program or of a reward function may be left, whatever session it made.
"""

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from lab.figures import Figure, command_parser, machine, report
from offbeat.sandbox.cgroups import FIRST_UID, MOST
from offbeat.sandbox.meter import descendants
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.tasks.python_code import passes
from offbeat.tasks.rewards import Reward
from offbeat.types import Json, Score
from tests.fixtures.attacks.sandbox_programs import CHEATS, HONEST, Problem

SECONDS = 2.0
"""The CPU limit of a test: the honest programs need hundredths of a second."""
HONEST_AT_ONCE = 4
ATTACKERS = 2
QUICK_WRONG = ("always True", "gives the question back", "answers the first test only", "script: says nothing")
PROBLEMS = [*HONEST, *(problem for problem in CHEATS if problem.name in QUICK_WRONG)]
BACKENDS = {"bubblewrap": "hardening.1", "bubblewrap-without-cgroups": "hardening.1.without-cgroups"}

_FORK = """
import os
def start(work, times):
    for _ in range(times):
        try:
            child = os.fork()
        except OSError:
            return
        if child == 0:
            try:
                os.setsid()
            except OSError:
                pass
            while True:
                work()
"""
_THEN_SPIN = "\ndef odd(n):\n    while True: pass\n"
ATTACKS = {
    "forks with sessions": _FORK + "start(lambda: None, 60)" + _THEN_SPIN,
    "CPU": _FORK
    + "import hashlib\ndata = bytes(1 << 20)\nstart(lambda: hashlib.sha512(data).digest(), 8)"
    + _THEN_SPIN,
    "memory bandwidth": _FORK
    + "a, b = bytearray(12 << 20), bytearray(12 << 20)\ndef copy():\n    a[:] = b\n    b[:] = a\nstart(copy, 6)"
    + _THEN_SPIN,
    "process ids": """
import os, time
while True:
    try:
        if os.fork() == 0 and os.getpid() % 3 == 0: os._exit(0)
    except OSError:
        pass
""",
    "file handles": _FORK
    + """
held = []
def hold():
    try:
        pair = os.pipe()
        os.set_blocking(pair[1], False)
        os.write(pair[1], bytes(1 << 16))
        held.append(pair)
    except OSError:
        pass
start(hold, 60)
"""
    + _THEN_SPIN,
}
_TESTS: list[Json] = [{"call": "odd", "args": [1], "result": True}]


def start_daemons(text: str, columns: Mapping[str, Json]) -> float:
    """A reward function that leaves processes behind: each in a session of its own, and orphaned at once."""
    for _ in range(5 if text else 0):  # an empty text is the control of a failure
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", text])
            os._exit(0)
        os.wait()
    if columns["dies"]:
        os._exit(1)
    return 1.0


@contextmanager
def attackers(pool: ScoringPool, name: str) -> Iterator[Counter[str]]:
    """Keep attackers in the pool while the block runs. Yield how they end."""
    over, ended = threading.Event(), Counter[str]()
    text = f"```python\n{ATTACKS[name]}\n```"

    def attack() -> None:
        while not over.is_set():
            ended[str(pool.score(text, {"tests": _TESTS}).result(timeout=3_600))] += 1

    threads = [threading.Thread(target=attack, name=f"attacker {n}") for n in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)  # until they have forked
        yield ended
    finally:
        over.set()
        for thread in threads:
            thread.join()


def score_all(pool: ScoringPool, problems: list[Problem]) -> list[Outcome]:
    """Score the problems, a few at a time."""

    def score(problem: Problem) -> Outcome:
        return pool.score(problem.completion, problem.columns, of=problem.name).result(timeout=3_600)

    with ThreadPoolExecutor(HONEST_AT_ONCE) as threads:
        return list(threads.map(score, problems))


def changed(problems: list[Problem], outcomes: list[Outcome], quiet: Mapping[str, Outcome]) -> list[str]:
    """Return the problems whose verdict is not that of a quiet machine."""
    pairs = zip(problems, outcomes, strict=True)
    return [f"{problem.name}: {outcome}" for problem, outcome in pairs if outcome != quiet[problem.name]]


def left_over(argument: str = "") -> list[int]:
    """Return the processes of slots, below this process, and with the argument."""
    found = set(descendants(os.getpid()))
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            slot = FIRST_UID <= folder.stat().st_uid < FIRST_UID + MOST
            if slot or (argument and argument.encode() in (folder / "cmdline").read_bytes()):
                found.add(int(folder.name))
    return sorted(found)


def beside_attacks(backend: str, each: int) -> tuple[list[str], dict[str, Counter[str]], int]:
    """Return the changed verdicts, how the attackers ended, and the number of processes left."""
    reward = Reward(partial(passes, seconds=SECONDS, sandbox=backend))
    wrong: list[str] = []
    ended: dict[str, Counter[str]] = {}
    with ScoringPool([reward], workers=HONEST_AT_ONCE + ATTACKERS, deadline=900.0) as pool:
        quiet = dict(zip((one.name for one in PROBLEMS), score_all(pool, PROBLEMS), strict=True))
        wrong += [f"quiet: {name}: {outcome}" for name, outcome in quiet.items() if not isinstance(outcome, Score)]
        for number, name in enumerate(ATTACKS):
            chosen = list(islice(cycle(PROBLEMS), number * each, (number + 1) * each))
            with attackers(pool, name) as ended[name]:
                found = changed(chosen, score_all(pool, chosen), quiet)
            wrong += [f"{name}: {one}" for one in found]
            print(f"{backend}, {name}: {len(found)} of {each} changed; attackers {dict(ended[name])}", flush=True)
    return wrong, ended, len(left_over())


def daemons_left(times: int) -> int:
    """Return the processes left of a reward function that starts daemons, whether it ends well or dies."""
    left = 0
    for dies in [False, True] * times:
        name = f"{random.SystemRandom().uniform(1e5, 9e5):.6f}"
        with ScoringPool([Reward(start_daemons)], workers=1, answer_fault="unscorable") as pool:
            pool.score(name, {"dies": dies}).result(timeout=600)
        left += len(left_over(name))
    return left


def main() -> bool:
    parser = command_parser(__doc__, short="a few programs beside each attack")
    short = parser.parse_args().short
    each = 8 if short else 200
    rows, daemons = [], daemons_left(1 if short else 10)
    for backend, id_ in BACKENDS.items():
        wrong, ended, left = beside_attacks(backend, each)
        for line in wrong[:20]:
            print(line)
        count = each * len(ATTACKS)
        how = "with control groups" if backend == "bubblewrap" else "without control groups, by CPU time"
        attacks = sum(counter.total() for counter in ended.values())
        rows.append(
            Figure(
                id_,
                f"honest programs whose verdict is unchanged beside five attacks, {how}; processes left",
                "all of 1,000; 0",
                f"{count - len(wrong):,} of {count:,}; {left + daemons}",
                "verdicts; processes",
                not wrong and left + daemons == 0,
                count,
                f"{ATTACKERS} attackers at a time, {attacks} in all ({', '.join(ATTACKS)}), beside {HONEST_AT_ONCE} "
                f"honest programs; daemons of reward functions left: {daemons}; {machine()}",
            )
        )
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main())
