"""Test the scoring pool while its workers are killed, stopped and run out of memory, during 10,000 completions.

    python -m lab.torture.scoring             torture, then rates; 3 minutes; writes rows tasks.5.*
    python -m lab.torture.scoring --short     1,500 completions; records nothing

The right outcome of every completion is known. Twelve of a thousand completions fail by themselves (memory, hanging,
raising, NaN). A thread strikes a random worker about once a second, and four times all workers at once. After those it
measures the time until the pool reaches four fifths of the undisturbed rate again.
"""

import bisect
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lab.figures import Figure, command_parser, record
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.scoring.tally import FailureLimit
from offbeat.tasks.gsm8k import correct
from offbeat.tasks.rewards import Reward
from offbeat.types import Score, Unscorable
from tests.fixtures import scoring_reward

WORKERS = 4
DEADLINE = 1.5
MEMORY_MIB = 256
TROUBLES = {
    (place + offset) % 1_000: name
    for place, name in {107: "memory", 131: "hangs", 153: "raises", 183: "nan"}.items()
    for offset in (0, 300, 600)
}
"""The completions of each thousand that fail by themselves, by number."""
STRIKES = ("SIGKILL", "SIGSTOP", "memory")
WINDOW = 0.5
"""Seconds over which a rate is measured."""


@dataclass
class Ledger:
    """When completions ended, and how workers were struck."""

    ends: list[float] = field(default_factory=list)
    ended: Counter[int] = field(default_factory=Counter)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    struck: Counter[str] = field(default_factory=Counter)
    mass_strikes: list[tuple[float, str]] = field(default_factory=list)
    """Time and kind of the strikes on all workers at once."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, number: int, outcome: Outcome) -> None:
        """Record the result of a completion."""
        with self.lock:
            self.ends.append(time.monotonic())
            self.ended[number] += 1
            self.outcomes[number] = outcome

    def rate(self, start: float, end: float) -> float:
        """Return the completions a second between two times."""
        ends = sorted(self.ends)
        return (bisect.bisect_left(ends, end) - bisect.bisect_left(ends, start)) / (end - start)

    def recovery(self, struck_at: float, wanted: float) -> float:
        """Return the seconds from a strike until the rate over the next window is at least `wanted`."""
        for tenth in range(600):
            start = struck_at + tenth / 10
            if self.rate(start, start + WINDOW) >= wanted:
                return start - struck_at
        return float("inf")


def strike(pid: int, how: str) -> bool:
    """Strike one worker. Return False if it had already ended."""
    try:
        if how == "memory":
            resource.prlimit(pid, resource.RLIMIT_DATA, (1 << 20, 1 << 20))
        else:
            os.kill(pid, signal.Signals[how])
    except (ProcessLookupError, PermissionError):
        return False
    return True


def keep_striking(pool: ScoringPool, ledger: Ledger, over: threading.Event, rng: random.Random, mass: int) -> None:
    """Strike a random worker about once a second. Sometimes strike all at once and then pause for a while."""
    while not over.wait(rng.uniform(0.2, 1.4)):
        how = rng.choice(STRIKES)
        if len(ledger.mass_strikes) < mass and ledger.struck.total() >= 8 * (len(ledger.mass_strikes) + 1):
            how = ("SIGKILL", "SIGSTOP")[len(ledger.mass_strikes) % 2]
            at = time.monotonic()
            ledger.struck[how] += sum(strike(pid, how) for pid in pool.pids)
            ledger.mass_strikes.append((at, how))
            over.wait(7.0)
        elif pids := pool.pids:
            ledger.struck[how] += strike(rng.choice(pids), how)


def trouble(number: int) -> str:
    """Return what is wrong with a completion, or "fine"."""
    return TROUBLES.get(number % 1_000, "fine")


def wrong_outcomes(ledger: Ledger, count: int) -> list[str]:
    """Return the completions whose result neither they nor a strike on a worker explain."""
    found = [f"{n}: ended {ledger.ended[n]} times" for n in range(count) if ledger.ended[n] != 1]
    innocent = Counter[str]()
    for number, outcome in ledger.outcomes.items():
        if isinstance(outcome, Score):
            if trouble(number) != "fine" or outcome.reward != scoring_reward.expected(number):
                found.append(f"{number} ({trouble(number)}): {outcome}")
            continue
        kind = _kind(outcome)
        own = {"memory": "memory", "hangs": "SIGSTOP", "raises": "raised", "nan": "invalid", "fine": None}
        if kind != own[trouble(number)]:
            innocent[kind] += 1
    # A failure that a completion did not cause itself must come from a strike of that kind.
    for kind, number in innocent.items():
        if number > ledger.struck[kind]:
            found.append(f"{number} completions ended by {kind}, and {ledger.struck[kind]} strikes of that kind")
    return found


def _kind(outcome: Unscorable) -> str:
    """Return the kind of strike that would explain the outcome."""
    if outcome.reason == "timeout":
        return "SIGSTOP"
    if outcome.reason == "crash":
        if "SIGKILL" in outcome.detail:
            return "SIGKILL"
        return "raised" if "KeyError" in outcome.detail else "memory" if "emory" in outcome.detail else outcome.detail
    return outcome.reason


def note(ledger: Ledger, number: int, done: "Future[Outcome]") -> None:
    ledger.end(number, done.result())


@contextmanager
def quiet_workers() -> Iterator[None]:
    """Hide the tracebacks of workers that are struck while they start."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def torture(count: int, mass_strikes: int, seed: int) -> tuple[Ledger, float]:
    """Score all completions in one pool. Return the ledger and the undisturbed rate."""
    ledger = Ledger()
    over = threading.Event()
    start_pool = partial(
        ScoringPool, workers=WORKERS, deadline=DEADLINE, memory_mib=MEMORY_MIB, waiting=32,
        answer_fault="unscorable", limit=FailureLimit(share=1.0),
    )  # fmt: skip
    with quiet_workers(), start_pool([Reward(scoring_reward.reward)]) as pool:
        calm = count // 10
        arguments = (pool, ledger, over, random.Random(seed), mass_strikes)
        striker = threading.Thread(target=keep_striking, args=arguments, name="striker")
        futures = []
        for number in range(count):
            if number == calm // 2:  # by then every worker has started
                start = time.monotonic()
            if number == calm:
                undisturbed = ledger.rate(start, time.monotonic())
                striker.start()
            future = pool.score(f"{number} {trouble(number)}", {}, of=str(number))
            future.add_done_callback(partial(note, ledger, number))
            futures.append(future)
        for future in futures:
            future.result(timeout=120)
        over.set()
        striker.join()
        report = pool.report()
    print(f"strikes {dict(ledger.struck)}, {len(ledger.mass_strikes)} on all at once; {report.restarts} restarts")
    print(f"scored {report.scored}, unscorable {dict(report.unscorable)}")
    return ledger, undisturbed


def rate(reward: Reward, text: str, count: int) -> float:
    """Return the completions a second through two workers."""
    columns = {"prompt": "How many eggs does she sell? " * 8, "answer": "18"}
    with ScoringPool([reward], workers=2) as pool:
        pool.score_all([(text, columns)] * 200)
        start = time.monotonic()
        outcomes = pool.score_all((text, columns) for _ in range(count))
        seconds = time.monotonic() - start
    assert all(outcome == Score(1.0, {reward.name: 1.0}) for outcome in outcomes)
    return count / seconds


def main() -> bool:
    parser = command_parser(__doc__, short="1,500 completions; record nothing")
    parser.add_argument("--seed", type=int, default=4, help="of the random strikes")
    options = parser.parse_args()
    count, mass_strikes = (1_500, 1) if options.short else (10_000, 4)
    ledger, undisturbed = torture(count, mass_strikes, options.seed)
    wrong = wrong_outcomes(ledger, count)
    accidental = sum(isinstance(o, Score) and o.reward == 0 for o in ledger.outcomes.values())
    recoveries = [(ledger.recovery(at, 0.8 * undisturbed), how) for at, how in ledger.mass_strikes]
    print(f"undisturbed {undisturbed:.0f}/s; back after " + ", ".join(f"{s:.1f} s ({how})" for s, how in recoveries))
    print(*wrong[:20], sep="\n")
    worst = max(seconds for seconds, _ in recoveries)
    if options.short:
        print(f"{count} completions, {len(wrong)} wrong, {accidental} zeros, recovery {worst:.1f} s")
        return not wrong and not accidental
    per_minute = {
        "trivial": rate(Reward(_one), "x" * 400, 10_000) * 60,
        "gsm8k": rate(Reward(correct), "Step by step. " * 40 + "#### 18", 10_000) * 60,
    }
    return record(*figures(ledger, count, len(wrong), accidental, worst, per_minute))


def _one(text: str, columns: object) -> float:
    return 1.0


def figures(
    ledger: Ledger, count: int, wrong: int, accidental: int, worst: float, per_minute: dict[str, float]
) -> list[Figure]:
    """Rows tasks.5.*."""
    strikes = ", ".join(f"{number} {kind}" for kind, number in sorted(ledger.struck.items()))
    setting = f"{WORKERS} workers on 2 cores, deadline {DEADLINE} s; strikes: {strikes}"
    return [
        Figure(
            "tasks.5.ended",
            "completions that ended once, with the right score or a reason that a strike or they themselves explain",
            f"{count:,} of {count:,}",
            count - wrong,
            "completions",
            not wrong,
            count,
            setting,
        ),
        Figure(
            "tasks.5.zeros", "rewards of 0 by accident", "0", accidental, "completions", not accidental, count, setting
        ),
        Figure(
            "tasks.5.recovery",
            "longest time until 80 % of the undisturbed rate is reached again after all workers are struck at once",
            "<= 5",
            round(worst, 1),
            "s",
            worst <= 5,
            len(ledger.mass_strikes),
            f"SIGKILL and SIGSTOP in turn; rates over {WINDOW:g} s; a stopped worker is noticed after {DEADLINE} s",
        ),
        *(
            Figure(
                f"tasks.5.rate.{name}",
                f"completions a minute through two workers, {name} scorer",
                ">= 10000",
                round(value),
                "1/min",
                value >= 10_000,
                10_000,
            )
            for name, value in per_minute.items()
        ),
    ]


if __name__ == "__main__":
    sys.exit(not main())
