"""Measure the sandbox.

    python -m lab.bench.sandbox attacks   programs that try to escape, judged from outside: row tasks.3
    python -m lab.bench.sandbox mixed     correct programs while attacks run beside them: row tasks.3.beside
    python -m lab.bench.sandbox rate      programs a second: row tasks.3.rate
    python -m lab.bench.sandbox cheats    completions that fake success: row tasks.4.code

Minutes each. `--short` runs a small part and records nothing.
"""

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
from lab.attacks.sandbox_witness import HELD, Unconfined, Witness, witness
from lab.figures import Figure, command_parser, machine, record
from offbeat.errors import SandboxError
from offbeat.sandbox import Sandbox, SandboxLimits, open_sandbox
from offbeat.sandbox.cgroups import FIRST_UID
from offbeat.tasks.code_tests import parse
from offbeat.tasks.python_code import TestVerdict, judge, program_in
from tests.fixtures.attacks.sandbox_programs import CHEATS, HONEST, Problem

ATTACK_LIMITS = SandboxLimits(seconds=1.5, memory_mb=128, processes=32, idle_seconds=1.5)
CORRECT_GOAL = 1_000
RATE_GOAL = 40.0
LIMITS_KNOWN = {
    "MEMORY_MB": ATTACK_LIMITS.memory_mb,
    "PROCESSES": ATTACK_LIMITS.processes,
    "FILES_MB": ATTACK_LIMITS.files_mb,
}


def run_attack(observer: Witness, attack: Attack, sandbox: Sandbox) -> list[str]:
    """Run an attack and return the evidence that it escaped: an empty list if the sandbox held."""
    found = []
    for _ in range(2 if attack.twice else 1):
        before, since = observer.state(), time.monotonic()
        outcome = sandbox.run(attack.text(observer.facts | LIMITS_KNOWN), b"", ATTACK_LIMITS)
        found += observer.evidence(outcome, time.monotonic() - since, ATTACK_LIMITS, before)
        found += [f"process {pid} is left" for pid in observer.left_over()]
    return found


def is_missed(attack: Attack) -> bool:
    """Return True if the witness misses an attack without a sandbox, both as root and as the user of a slot."""
    for uid in (0, FIRST_UID):
        with witness(slots=1) as observer:
            found = run_attack(observer, attack, Unconfined(uid))
            for pid in observer.left_over():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if found:
            return False
    return True


def persistent_evidence(observer: Witness, attack: Attack) -> list[str]:
    """Return the signs of success. On a busy machine a harmless program is late too, but not three times in a row."""
    for _ in range(3):
        found = run_attack(observer, attack, open_sandbox())
        if not found or not all(sign.startswith(HELD) for sign in found):
            break
    return found


def attacks(short: bool) -> bool:
    """Row tasks.3: no attack escapes. Without a sandbox, the witness detects every harmless one."""
    chosen = ATTACKS[::7] if short else ATTACKS
    controls = [attack for attack in chosen if attack.harmless][:: 2 if short else 1]
    missed = [attack.name for attack in controls if is_missed(attack)]
    escaped: dict[str, list[str]] = {}
    with witness(slots=2) as observer:
        for attack in chosen:
            if found := persistent_evidence(observer, attack):
                escaped[attack.name] = found
                print(f"{attack.name}: {found}")
    print(f"{len(chosen)} attacks, {len(escaped)} escaped; {len(controls)} controls, missed: {missed or 'none'}")
    holds = not escaped and not missed
    if short:
        return holds
    note = f"{len(controls)} of them run without a sandbox as well: the witness detects {len(controls) - len(missed)}"
    figure = Figure(
        "tasks.3", "sandbox attacks that escape", "0 of ≥ 40", len(escaped), "escapes", holds, len(chosen), note
    )
    return record(figure)


def verdict(problem: Problem, limits: SandboxLimits) -> TestVerdict:
    """Return how the task judges a completion, with the reason."""
    program = program_in(problem.completion)
    return judge(program, parse(problem.tests), open_sandbox(), limits) if program else TestVerdict(False, "no program")


def mixed(short: bool) -> bool:
    """Row tasks.3.beside: correct programs pass while attacks run beside them."""
    count = 24 if short else CORRECT_GOAL
    done = threading.Event()
    escaped: list[str] = []
    attacked: list[str] = []

    def keep_attacking(offset: int, observer: Witness) -> None:
        for attack in islice(cycle(ATTACKS), offset, None):
            if done.is_set():
                return
            # Other attacks end at any time, so processes that are left over are no evidence here.
            before, since = observer.state(), time.monotonic()
            outcome = open_sandbox().run(attack.text(observer.facts | LIMITS_KNOWN), b"", ATTACK_LIMITS)
            escaped.extend(observer.evidence(outcome, time.monotonic() - since, ATTACK_LIMITS, before))
            attacked.append(attack.name)

    with witness(slots=5) as observer, ThreadPoolExecutor(4) as pool:
        attackers = [pool.submit(keep_attacking, offset, observer) for offset in (0, len(ATTACKS) // 2)]
        try:
            problems = list(islice(cycle(HONEST), count))
            halves = [
                pool.submit(lambda part: [verdict(p, SandboxLimits()) for p in part], problems[n::2]) for n in (0, 1)
            ]
            verdicts = [v for half in halves for v in half.result()]
        finally:
            done.set()
        for attacker in attackers:
            attacker.result()
    wrong = [v.why for v in verdicts if not v.passed]
    passed = len(verdicts) - len(wrong)
    print(
        f"{passed} of {count} correct programs passed beside {len(attacked)} attacks; wrong: {wrong[:5]} {escaped[:5]}"
    )
    holds = passed == count and not escaped
    if short:
        return holds
    note = (
        f"beside {len(attacked)} attacks on two more threads, {len(escaped)} escapes; {len(HONEST)} kinds; {machine()}"
    )
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
    """Row tasks.3.rate: programs a second, each in a sandbox of its own, against bare starts of the interpreter."""
    count, block = (40, 20) if short else (600, 60)
    problem = HONEST[0]
    verdict(problem, SandboxLimits())
    times = {"sandboxed": 0.0, "bare": 0.0}
    passed = 0
    with ThreadPoolExecutor(4) as pool:
        for _ in range(count // block):  # in turns, so that both run on an equally busy machine
            since = time.monotonic()
            passed += sum(v.passed for v in pool.map(lambda _: verdict(problem, SandboxLimits()), range(block)))
            between = time.monotonic()
            list(pool.map(lambda _: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True), range(block)))
            times["sandboxed"] += between - since
            times["bare"] += time.monotonic() - between
    speed, bare = (count / seconds for seconds in times.values())
    print(f"{speed:.1f} runs/s, bare interpreters {bare:.1f}/s, {passed} of {count} passed, {machine()}")
    if short:
        return passed == count
    note = f"4 threads, {passed} passed; the bare interpreter alone, in turns with it: {bare:.0f} starts/s; {machine()}"
    holds = speed >= RATE_GOAL and passed == count
    measured = round(speed, 1)
    figure = Figure(
        "tasks.3.rate", "sandboxed programs a second", "≥ 40 on 2 cores", measured, "runs/s", holds, count, note
    )
    return record(figure)


def cheats(short: bool) -> bool:
    """Row tasks.4.code: a program that fakes success scores 0, a correct one scores 1."""
    chosen = CHEATS[::5] if short else CHEATS
    rewarded, failed = [], []
    for cheat in chosen:
        try:
            if verdict(cheat, SandboxLimits(seconds=2.0, idle_seconds=2.0)).passed:
                rewarded.append(cheat.name)
        except SandboxError as error:
            failed.append(f"{cheat.name}: {error}")
    refused = [problem.name for problem in HONEST if not verdict(problem, SandboxLimits()).passed]
    print(f"{len(chosen)} cheats, rewarded: {rewarded or 'none'}; without a score: {failed or 'none'}")
    print(f"{len(HONEST)} honest programs, without a reward: {refused or 'none'}")
    holds = not rewarded and not failed and not refused
    if short:
        return holds
    note = f"{len(HONEST)} honest programs, {len(HONEST) - len(refused)} score 1; without a score: {len(failed)}"
    figure = Figure(
        "tasks.4.code",
        "programs that fake success and score above 0",
        "0",
        len(rewarded),
        "cheats",
        holds,
        len(chosen),
        note,
    )
    return record(figure)


def main() -> None:
    parser = command_parser(__doc__, short="run a small part and record nothing")
    commands = {"attacks": attacks, "mixed": mixed, "rate": rate, "cheats": cheats}
    parser.add_argument("command", choices=commands)
    chosen = parser.parse_args()
    sys.exit(0 if commands[chosen.command](chosen.short) else 1)


if __name__ == "__main__":
    main()
