"""kill -9 of the publisher at every system call by which it changes the weight log, by strace injection.

A process opens a log, publishes what comes before, and waits. strace attaches, set to kill it at the n-th call of one
kind; then the process publishes. n counts up until the process survives. A kill strikes before the call is done, so
every state of the disk between two calls is met.
"""

import ctypes
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.figures import Figure
from lab.fixtures.processes import Say, Work, child, heard, outcome
from lab.fixtures.weights import equals, made
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription

CALLS = ("write", "fsync", "rename", "unlink", "openat", "mkdir", "ftruncate")
PTRACER, ANY_PROCESS = 0x59616D61, -1
MOST = 60
"""Calls of one kind in one scenario; more would mean that the loop does not end."""


@dataclass(frozen=True)
class Scenario:
    """What is published while the kill strikes."""

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


def publishing(place: str, scenario: Scenario, go: int) -> Work:
    """Publish what comes before, say so, wait for the word, publish the rest and acknowledge each."""

    def opened() -> WeightLog:
        return WeightLog.open(place, anchor_every=scenario.anchor_every, keep=scenario.keep)

    def work(say: Say) -> None:
        ctypes.CDLL(None).prctl(PTRACER, ANY_PROCESS, 0, 0, 0)  # lets strace attach where only parents may
        log = opened() if scenario.before else None
        for version in scenario.before:
            assert log is not None
            log.publish(version, made(version).items())
        say("ready")
        os.read(go, 1)
        log = log or opened()  # making the folders is struck too
        for version in scenario.during:
            log.publish(version, made(version).items())
            say(f"published {version}")

    return work


def examining(place: str, scenario: Scenario, acknowledged: int) -> Work:
    """Every version listed must load, bit by bit, in every way; the newest is the one before or the new one."""

    def work(say: Say) -> None:
        last = max(scenario.before, default=None)
        with Subscription.open(place, name="examiner") as reader:
            versions = reader.versions()
            if reader.newest() not in {last, *scenario.during} or (
                acknowledged >= 0 and reader.newest() != acknowledged
            ):
                say(f"FAILED newest is {reader.newest()}, acknowledged was {acknowledged}")
            for version in versions:
                for again in (False, True):
                    if not equals(dict(reader.fetch(version, from_anchor=again)), version):
                        say(f"FAILED version {version} is a mixture")
        following = max(versions, default=-1) + 1
        with WeightLog.open(place, anchor_every=scenario.anchor_every, keep=scenario.keep) as log:
            log.publish(following, made(following).items())
            left = log.versions()
        with Subscription.open(place, name="examiner") as reader:
            if reader.versions() != left or not all(equals(dict(reader.fetch(v)), v) for v in left):
                say(f"FAILED after the next publisher: {reader.versions()}")
        if garbage := unnamed(Path(place)):
            say(f"FAILED files that no manifest names: {garbage}")

    return work


def unnamed(place: Path) -> list[str]:
    """Files of data/ that no version has, and half-written manifests."""
    named = "".join(manifest.read_text() for manifest in (place / "versions").glob("*.json"))
    files = [file.name for file in (place / "data").iterdir() if file.name not in named]
    return files + [file.name for file in (place / "versions").glob(".*")]


def struck(scenario: Scenario, call: str, when: int) -> tuple[bool, list[str]]:
    """One run, killed at the `when`-th such call; whether it was killed, and what is wrong afterwards."""
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as temporary:
        place, report = str(Path(temporary) / "log"), Path(temporary) / "strace.txt"
        go, send = os.pipe()
        pid, hear = child(publishing(place, scenario, go))
        os.close(go)
        ready = os.read(hear, 6)
        tracer = attach(pid, report, call, when)
        os.write(send, b"g")
        os.close(send)
        said = heard(hear)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        tracer.wait()
        acknowledged = max((int(line.split()[1]) for line in said if line.startswith("published ")), default=-1)
        problems = [line for line in said if line.startswith("FAILED")]
        problems += [] if ready == b"ready\n" else ["FAILED the process did not start"]
        problems += outcome(examining(place, scenario, acknowledged))
        return killed, problems


def attach(pid: int, report: Path, call: str, when: int) -> "subprocess.Popen[bytes]":
    """strace on all threads of a process; returns once it holds them."""
    inject = f"inject={call}:signal=SIGKILL:when={when}"
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-e", f"trace={call}", "-e", inject, "-o", str(report), "-p", str(pid)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        if all(not re.search(r"TracerPid:\t0\n", (task / "status").read_text()) for task in tasks):
            return tracer
        time.sleep(0.005)
    raise SystemExit("strace could not attach; is ptrace allowed here?")


def every_kill(scenarios: Sequence[Scenario] = SCENARIOS, calls: Sequence[str] = CALLS) -> list[Figure]:
    """Kill a publish at each of its calls, in each scenario."""
    kills: Counter[str] = Counter()
    problems: list[str] = []
    runs = 0
    for scenario in scenarios:
        for call in calls:
            for when in range(1, MOST):
                killed, found = struck(scenario, call, when)
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
        f"loaded from its anchor and onto its neighbour, and the next publisher went on and left no stray file"
    )
    return [
        Figure(
            "weights-rollout.7.kill",
            "kills of the publisher after which a reader saw a mixture, lost an acknowledged version or found an "
            "unloadable one",
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
            "a publish that removes four versions with their files; the kill strikes at each call in turn",
        ),
    ]
