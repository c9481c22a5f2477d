"""One publisher and many readers, each in a process of its own: what do readers cost, and do they all get the weights?

`python -m lab.torture.weights fanout` runs both parts.

Cost. The publisher publishes at a steady pace, with 1 reader and with 32, in alternating rounds. It counts its
processor time, its system calls and the wall time of each publish while readers poll and fetch every version.

Arrival. While versions are published and retired, readers join late, or are killed by SIGKILL during a download and
start again. Each must end with every bit of the last version.
"""

import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lab.figures import Figure
from offbeat.errors import VersionMissing
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.processes import Send, Work, fork, kill, read_lines, run_to_end
from tests.fixtures.weights import is_state, make_state

MANY = 32
LARGE = 4_000_000
"""Elements of the state whose download is interrupted: 8 MB, about ten milliseconds to read and verify."""


def reading(place: str, last: int, elements: int, poll: float) -> Work:
    """Follow the log up to the version `last`, whose state must be right."""

    def work(send: Send) -> None:
        with Subscription.open(place, name=f"reader {os.getpid()}") as reader:
            seen = -1
            while seen < last:
                newest = reader.newest()
                if newest is None or newest == seen:
                    time.sleep(poll)
                    continue
                send(f"fetching {newest}")
                try:
                    state = dict(reader.fetch(newest))
                except VersionMissing:  # retired between the two calls: look again
                    continue
                send(f"fetched {newest}")
                seen = newest
            send("arrived" if is_state(state, last, elements) else f"FAILED version {last} is not as published")

    return work


@dataclass(frozen=True)
class Cost:
    """The cost of one publish, as medians over a round."""

    wall: float
    processor: float
    writes: float
    reads: float


def publishing(place: str, versions: int, elements: int, pace: float) -> Work:
    """Publish at a steady pace and send the cost of each publish."""

    def work(send: Send) -> None:
        with WeightLog.open(place, anchor_every=10, keep=5) as log:
            for version in range(versions):
                state = make_state(version, elements)
                time.sleep(pace)
                io, wall, processor = io_calls(), time.perf_counter(), time.process_time()
                log.publish(version, state.items())
                took = time.perf_counter() - wall, time.process_time() - processor
                after = io_calls()
                send(f"cost {took[0]} {took[1]} {after['syscw'] - io['syscw']} {after['syscr'] - io['syscr']}")

    return work


def io_calls() -> dict[str, int]:
    """Return the read and write system calls of this process until now."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def round_of(readers: int, versions: int, elements: int, pace: float) -> Cost:
    """Publish to one log while `readers` processes follow it."""
    with tempfile.TemporaryDirectory(prefix="offbeat-fanout-") as place:
        followers = [fork(reading(place, versions - 1, elements, poll=0.1)) for _ in range(readers)]
        sent = run_to_end(publishing(place, versions, elements, pace))
        for pid, pipe in followers:
            if (lines := read_lines(pipe))[-1:] != ["arrived"]:
                raise SystemExit(f"a reader did not get the last version: {lines[-1:]}")
            os.waitpid(pid, 0)
    costs = [[float(value) for value in line.split()[1:]] for line in sent if line.startswith("cost ")]
    if len(costs) != versions:
        raise SystemExit(f"the publisher failed: {sent[-1:]}")
    return Cost(*(statistics.median(column) for column in zip(*costs[1:], strict=True)))  # the first makes the folders


def cost(rounds: int, versions: int, pace: float) -> list[Figure]:
    """Rows weights-rollout.6.calls, .cost and .wall: what a publish costs with 1 and with 32 readers, in turn."""
    elements = 40_000
    one: list[Cost] = []
    many: list[Cost] = []
    for number in range(rounds):
        for readers, results in ((1, one), (MANY, many)) if number % 2 == 0 else ((MANY, many), (1, one)):
            results.append(round_of(readers, versions, elements, pace))
    median = {
        name: [statistics.median(getattr(c, name) for c in costs) for costs in (one, many)]
        for name in ("wall", "processor", "writes", "reads")
    }
    wall, processor = (median[name][1] / median[name][0] for name in ("wall", "processor"))
    note = (
        f"{rounds} alternating rounds each of {versions} versions of {elements:,} bf16 elements, one every {pace:g} s, "
        f"anchor every 10; median of a publish with 1 and with {MANY} readers: wall "
        f"{_milliseconds(median['wall'])}, processor {_milliseconds(median['processor'])}, write calls "
        f"{median['writes'][0]:g} and {median['writes'][1]:g}, read calls {median['reads'][0]:g} and "
        f"{median['reads'][1]:g}; readers share the publisher's two cores, load average {os.getloadavg()[0]:.1f}"
    )
    more_calls = sum(median[name][1] - median[name][0] for name in ("writes", "reads"))
    return [
        Figure(
            "weights-rollout.6.calls",
            f"write and read calls of a publish with {MANY} readers − with 1",
            "0",
            more_calls,
            "calls",
            more_calls == 0,
            2 * rounds * (versions - 1),
            note,
        ),
        Figure(
            "weights-rollout.6.cost",
            f"processor time of a publish with {MANY} readers ÷ with 1",
            "≤ 1.1",
            round(processor, 2),
            "×",
            processor <= 1.1,
            2 * rounds * (versions - 1),
            note,
        ),
        Figure(
            "weights-rollout.6.wall",
            f"wall time of a publish with {MANY} readers ÷ with 1, all on two cores",
            "≤ 1.1",
            round(wall, 2),
            "×",
            wall <= 1.1,
            2 * rounds * (versions - 1),
            note,
        ),
    ]


def _milliseconds(values: list[float]) -> str:
    return " and ".join(f"{1000 * value:.1f} ms" for value in values)


def arrivals(count: int, seed: int) -> list[Figure]:
    """Row weights-rollout.6.arrive: late joiners and killed readers, half of each."""
    rng = random.Random(seed)
    arrived = interrupted = kills = 0
    problems: list[str] = []
    per_log = 20
    for start in range(0, count, per_log):
        with tempfile.TemporaryDirectory(prefix="offbeat-arrive-") as place:
            versions = 30
            pid, pipe = fork(publishing(place, versions, LARGE, pace=0.1))
            readers = []
            for number in range(start, min(start + per_log, count)):
                time.sleep(rng.uniform(0.0, 0.25))
                if number % 2:
                    interrupted += _killed_while_fetching(place, versions - 1, rng)
                    kills += 1
                readers.append(fork(reading(place, versions - 1, LARGE, poll=0.02)))
            for reader, reader_pipe in readers:
                lines = read_lines(reader_pipe)
                os.waitpid(reader, 0)
                arrived += lines[-1:] == ["arrived"]
                problems += [line for line in lines if line.startswith("FAILED")]
            problems += [line for line in read_lines(pipe) if line.startswith("FAILED")]
            os.waitpid(pid, 0)
    for line in problems[:5]:
        print("  ", line)
    return [
        Figure(
            "weights-rollout.6.arrive",
            "late joiners, and readers killed while they download and started again, that end with the last version",
            f"{count} of {count}",
            f"{arrived} of {count}",
            "readers",
            arrived == count and not problems,
            count,
            f"half of them joined late, half were killed before ({kills} kills, {interrupted} of them in the middle "
            f"of a fetch); 30 versions of {2 * LARGE / 1e6:g} MB a log, an anchor every 10, all but the "
            f"newest 5 and their chains retired meanwhile",
        )
    ]


def _killed_while_fetching(place: str, last: int, rng: random.Random) -> bool:
    """Start a reader and kill it a moment after it begins to fetch. Return True if the fetch had not ended."""
    pid, pipe = fork(reading(place, last, LARGE, poll=0.02))
    begun = os.read(pipe, 64)
    time.sleep(rng.uniform(0.0, 0.02))
    kill(pid)
    os.waitpid(pid, 0)
    sent = (begun.decode() + "".join(f"{line}\n" for line in read_lines(pipe))).splitlines()
    return sent[-1].startswith("fetching")
