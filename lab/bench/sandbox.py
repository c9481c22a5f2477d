"""Figures of the sandbox.

    python -m lab.bench.sandbox attacks   programs that try to get out, judged from outside
    python -m lab.bench.sandbox mixed     correct programs while attacks run beside them
    python -m lab.bench.sandbox rate      programs a second
    python -m lab.bench.sandbox cheats    completions that fake success

`--short` runs a small form of each and records nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice

from lab.attacks.sandbox_attacks import ATTACKS, Attack
from lab.attacks.sandbox_programs import CHEATS, HONEST, Problem
from lab.attacks.sandbox_witness import Unconfined, Witness, witness
from lab.figures import Figure, record
from offbeat.errors import SandboxError
from offbeat.sandbox import Sandbox, SandboxLimits, open_sandbox
from offbeat.sandbox.slots import FIRST_UID
from offbeat.tasks.code_tests import parse
from offbeat.tasks.python_code import TestVerdict, judge, program_in

ATTACK_LIMITS = SandboxLimits(seconds=1.5, memory_mb=128, processes=32)
CORRECT_GOAL = 1_000
RATE_GOAL = 40.0
LIMITS_KNOWN = {
    "MEMORY_MB": ATTACK_LIMITS.memory_mb,
    "PROCESSES": ATTACK_LIMITS.processes,
    "FILES_MB": ATTACK_LIMITS.files_mb,
}


def crowd() -> str:
    """How crowded the machine is."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def strike(house: Witness, attack: Attack, sandbox: Sandbox) -> list[str]:
    """Evidence that an attack got out; none is what is hoped for."""
    found = []
    for _ in range(2 if attack.twice else 1):
        before, since = house.house(), time.monotonic()
        outcome = sandbox.run(attack.text(house.facts | LIMITS_KNOWN), b"", ATTACK_LIMITS)
        found += house.evidence(outcome, time.monotonic() - since, ATTACK_LIMITS, before)
        found += [f"process {pid} is left" for pid in house.left_over()]
    return found


def blind(attack: Attack) -> bool:
    """Whether the witness misses an attack that nothing holds back, neither as root nor as a slot's user."""
    for uid in (0, FIRST_UID):
        with witness(slots=1) as house:
            found = strike(house, attack, Unconfined(uid))
            for pid in house.left_over():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if found:
            return False
    return True


def attacks(short: bool) -> bool:
    """Must show 3: nobody gets out. The same attacks, where harmless, without a sandbox: all are seen."""
    chosen = ATTACKS[::7] if short else ATTACKS
    controls = [attack for attack in chosen if attack.harmless][:: 2 if short else 1]
    unseen = [attack.name for attack in controls if blind(attack)]
    escaped: dict[str, list[str]] = {}
    with witness(slots=2) as house:
        for attack in chosen:
            if found := strike(house, attack, open_sandbox()):
                escaped[attack.name] = found
                print(f"{attack.name}: {found}")
    print(f"{len(chosen)} attacks, {len(escaped)} escaped; {len(controls)} controls, unseen: {unseen or 'none'}")
    holds = not escaped and not unseen
    if short:
        return holds
    note = f"{len(controls)} of them run without a sandbox as well: {len(controls) - len(unseen)} seen by the witness"
    figure = Figure(
        "tasks.3", "sandbox attacks that escape", "0 of ≥ 40", len(escaped), "escapes", holds, len(chosen), note
    )
    return record(figure)


def verdict(problem: Problem, limits: SandboxLimits) -> TestVerdict:
    """How the task judges a completion, with the reason."""
    program = program_in(problem.completion)
    return judge(program, parse(problem.tests), open_sandbox(), limits) if program else TestVerdict(False, "no program")


def mixed(short: bool) -> bool:
    """Must show 3: correct programs pass while attacks run beside them."""
    count = 24 if short else CORRECT_GOAL
    done = threading.Event()
    escaped: list[str] = []
    struck: list[str] = []

    def besiege(offset: int, house: Witness) -> None:
        for attack in islice(cycle(ATTACKS), offset, None):
            if done.is_set():
                return
            # Neighbouring attacks end at any time, so only what this one says and does to the house is evidence.
            before, since = house.house(), time.monotonic()
            outcome = open_sandbox().run(attack.text(house.facts | LIMITS_KNOWN), b"", ATTACK_LIMITS)
            escaped.extend(house.evidence(outcome, time.monotonic() - since, ATTACK_LIMITS, before))
            struck.append(attack.name)

    with witness(slots=5) as house, ThreadPoolExecutor(4) as pool:
        sieges = [pool.submit(besiege, offset, house) for offset in (0, len(ATTACKS) // 2)]
        try:
            problems = list(islice(cycle(HONEST), count))
            halves = [
                pool.submit(lambda part: [verdict(p, SandboxLimits()) for p in part], problems[n::2]) for n in (0, 1)
            ]
            verdicts = [v for half in halves for v in half.result()]
        finally:
            done.set()
        for siege in sieges:
            siege.result()
    wrong = [v.why for v in verdicts if not v.passed]
    passed = len(verdicts) - len(wrong)
    print(f"{passed} of {count} correct programs passed beside {len(struck)} attacks; wrong: {wrong[:5]} {escaped[:5]}")
    holds = passed == count and not escaped
    if short:
        return holds
    note = f"beside {len(struck)} attacks on two more threads, {len(escaped)} escapes; {len(HONEST)} kinds; {crowd()}"
    figure = Figure(
        "tasks.3.beside",
        "correct programs that pass beside attacks",
        "1000 of 1000",
        passed,
        "programs",
        holds,
        count,
        note,
    )
    return record(figure)


def rate(short: bool) -> bool:
    """Must show 3: programs a second, each in a sandbox of its own, beside bare starts of the interpreter."""
    count, block = (40, 20) if short else (600, 60)
    problem = HONEST[0]
    verdict(problem, SandboxLimits())
    times = {"sandboxed": 0.0, "bare": 0.0}
    passed = 0
    with ThreadPoolExecutor(4) as pool:
        for _ in range(count // block):  # in turns, so that both meet the same crowd
            since = time.monotonic()
            passed += sum(v.passed for v in pool.map(lambda _: verdict(problem, SandboxLimits()), range(block)))
            between = time.monotonic()
            list(pool.map(lambda _: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True), range(block)))
            times["sandboxed"] += between - since
            times["bare"] += time.monotonic() - between
    speed, bare = (count / seconds for seconds in times.values())
    print(f"{speed:.1f} runs/s, bare interpreters {bare:.1f}/s, {passed} of {count} passed, {crowd()}")
    if short:
        return passed == count
    note = f"4 threads, {passed} passed; the bare interpreter alone, in turns with it: {bare:.0f} starts/s; {crowd()}"
    holds = speed >= RATE_GOAL and passed == count
    measured = round(speed, 1)
    figure = Figure(
        "tasks.3.rate", "sandboxed programs a second", "≥ 40 on 2 cores", measured, "runs/s", holds, count, note
    )
    return record(figure)


def cheats(short: bool) -> bool:
    """Must show 4, programs: whatever fakes success scores 0; what is correct scores 1."""
    chosen = CHEATS[::5] if short else CHEATS
    paid, failed = [], []
    for cheat in chosen:
        try:
            if verdict(cheat, SandboxLimits(seconds=2.0)).passed:
                paid.append(cheat.name)
        except SandboxError as error:
            failed.append(f"{cheat.name}: {error}")
    refused = [problem.name for problem in HONEST if not verdict(problem, SandboxLimits()).passed]
    print(
        f"{len(chosen)} cheats, paid: {paid or 'none'}; without a score: {failed or 'none'}; honest refused: {refused}"
    )
    holds = not paid and not failed and not refused
    if short:
        return holds
    note = f"{len(HONEST)} honest programs, {len(HONEST) - len(refused)} score 1; without a score: {len(failed)}"
    figure = Figure(
        "tasks.4.code",
        "programs that fake success and score above 0",
        "0",
        len(paid),
        "cheats",
        holds,
        len(chosen),
        note,
    )
    return record(figure)


def main() -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"attacks": attacks, "mixed": mixed, "rate": rate, "cheats": cheats}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--short", action="store_true")
    chosen = parser.parse_args()
    sys.exit(0 if commands[chosen.command](chosen.short) else 1)


if __name__ == "__main__":
    main()
