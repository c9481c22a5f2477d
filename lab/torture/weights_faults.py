"""Kill the publisher with SIGKILL at every system call by which it changes the weight log.

A process opens a log, publishes the first versions, and waits. strace attaches and will kill it at the n-th call of one
kind; then the process publishes. n counts up until the process survives. A kill comes before the call is done, so every
state of the disk between two calls is tested.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.figures import Figure
from lab.fixtures.strace import allow_strace, attach, kill_at
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.processes import Send, Work, fork, read_lines, run_to_end
from tests.fixtures.weights import is_state, make_state

CALLS = ("write", "fsync", "rename", "unlink", "openat", "mkdir", "ftruncate")
MOST = 60
"""Limit on the calls of one kind in one scenario; more would mean that the loop does not end."""


@dataclass(frozen=True)
class Scenario:
    """The versions that are published before and during the kill."""

    name: str
    before: Sequence[int]
    during: Sequence[int]
    anchor_every: int = 20
    keep: int = 20


SCENARIOS = (
    Scenario("first version", before=(), during=(0,)),
    Scenario("patch", before=(0, 1), during=(2,)),
    Scenario("anchor and patch", before=(0, 1), during=(2,), anchor_every=2),
    Scenario("retention of a chain", before=(0, 1, 2, 3), during=(4,), anchor_every=4, keep=1),
)


def publishing(place: str, scenario: Scenario, start_pipe: int) -> Work:
    """Publish the first versions, wait for a byte from `start_pipe`, then publish the others and send each."""

    def opened() -> WeightLog:
        return WeightLog.open(place, anchor_every=scenario.anchor_every, keep=scenario.keep)

    def work(send: Send) -> None:
        allow_strace()
        log = opened() if scenario.before else None
        for version in scenario.before:
            assert log is not None
            log.publish(version, make_state(version).items())
        send("ready")
        os.read(start_pipe, 1)
        log = log or opened()  # kills also hit the creation of the folders
        for version in scenario.during:
            log.publish(version, make_state(version).items())
            send(f"published {version}")

    return work


def examining(place: str, scenario: Scenario, acknowledged: int) -> Work:
    """Check that every listed version loads with every bit, both ways, and that the newest version is the right one."""

    def work(send: Send) -> None:
        last = max(scenario.before, default=None)
        with Subscription.open(place, name="examiner") as reader:
            versions = reader.versions()
            if reader.newest() not in {last, *scenario.during} or (
                acknowledged >= 0 and reader.newest() != acknowledged
            ):
                send(f"FAILED newest is {reader.newest()}, acknowledged was {acknowledged}")
            for version in versions:
                for again in (False, True):
                    if not is_state(dict(reader.fetch(version, from_anchor=again)), version):
                        send(f"FAILED version {version} mixes two versions")
        following = max(versions, default=-1) + 1
        with WeightLog.open(place, anchor_every=scenario.anchor_every, keep=scenario.keep) as log:
            log.publish(following, make_state(following).items())
            log.drop_superseded()
            left = log.versions()
        with Subscription.open(place, name="examiner") as reader:
            if reader.versions() != left or not all(is_state(dict(reader.fetch(v)), v) for v in left):
                send(f"FAILED after the next publisher: {reader.versions()}")
        if garbage := unnamed(Path(place)):
            send(f"FAILED files that no manifest names: {garbage}")

    return work


def unnamed(place: Path) -> list[str]:
    """Return the files of data/ that no manifest names, and half-written manifests."""
    named = "".join(manifest.read_text() for manifest in (place / "versions").glob("*.json"))
    files = [file.name for file in (place / "data").iterdir() if file.name not in named]
    return files + [file.name for file in (place / "versions").glob(".*")]


def killed_at(scenario: Scenario, call: str, when: int) -> tuple[bool, list[str]]:
    """Kill a publisher at the `when`-th such call. Return whether it was killed, and the problems afterwards."""
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as temporary:
        place, report = str(Path(temporary) / "log"), Path(temporary) / "strace.txt"
        start_read, start_write = os.pipe()
        pid, pipe = fork(publishing(place, scenario, start_read))
        os.close(start_read)
        ready = os.read(pipe, 6)
        tracer = attach(pid, report, kill_at(call, when))
        os.write(start_write, b"g")
        os.close(start_write)
        sent = read_lines(pipe)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        tracer.wait()
        acknowledged = max((int(line.split()[1]) for line in sent if line.startswith("published ")), default=-1)
        problems = [line for line in sent if line.startswith("FAILED")]
        problems += [] if ready == b"ready\n" else ["FAILED the process did not start"]
        problems += run_to_end(examining(place, scenario, acknowledged))
        return killed, problems


def every_kill(scenarios: Sequence[Scenario] = SCENARIOS, calls: Sequence[str] = CALLS) -> list[Figure]:
    """Rows weights-rollout.7.*: kill a publish at each of its calls, in each scenario."""
    kills: Counter[str] = Counter()
    problems: list[str] = []
    runs = 0
    for scenario in scenarios:
        for call in calls:
            for when in range(1, MOST):
                killed, found = killed_at(scenario, call, when)
                runs += 1
                problems += [f"{scenario.name}, {call} {when}: {line}" for line in found]
                if not killed:
                    break
                kills[f"{call} × {scenario.name}"] += 1
            else:
                problems.append(f"{scenario.name}: more than {MOST} calls of {call}")
    for line in problems[:10]:
        print("  ", line)
    by_call = Counter({call: sum(n for key, n in kills.items() if key.startswith(call)) for call in calls})
    retained = sum(n for key, n in kills.items() if key.endswith("retention of a chain"))
    note = (
        f"scenarios: {', '.join(s.name for s in scenarios)}; kills by call: "
        f"{', '.join(f'{call} {n}' for call, n in by_call.items())}; {runs} runs. After each, every listed version was "
        f"loaded from its anchor and from its neighbor, and the next publisher continued and left no stray file"
    )
    return [
        Figure(
            "weights-rollout.7.kill",
            "kills of the publisher after which a reader got a mix of versions, lost an acknowledged version or found "
            "an unloadable one",
            "0, every write and rename hit",
            len(problems),
            "kills",
            not problems and all(by_call[call] for call in calls if call in ("write", "rename")),
            kills.total(),
            note,
        ),
        Figure(
            "weights-rollout.7.retention",
            "kills during a publish that retires versions, after which the last loadable version was gone",
            "0",
            sum("retention" in line for line in problems),
            "kills",
            not any("retention" in line for line in problems) and retained > 0,
            retained,
            "a publish that removes four versions with their files; the kill comes at each call in turn",
        ),
    ]
