"""Break one commit of the experience log with strace, at each write, fsync, rename and link that it makes.

A process opens a log, appends one group, and waits. strace attaches and will inject one fault; then the process appends
a second group. strace counts calls per thread, and Lance spreads its calls over threads. So the output of strace tells
which step a run hit, and runs repeat until every fault has hit every step of a commit.
"""

import os
import re
import select
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import Path

from lab.figures import Figure
from lab.fixtures.strace import allow_strace, attach, threads_of
from offbeat.errors import LogWriteError
from offbeat.experience.log import ExperienceLog
from tests.fixtures.groups import make_group
from tests.fixtures.processes import Send, Work, fork, kill, run_to_end

CALLS = {
    "write": "write,pwrite64,writev",
    "fsync": "fsync,fdatasync",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
}
FAULTS = {"SIGKILL": "signal=SIGKILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}
PLACES = [  # what a path inside the log is; the first match counts
    (re.compile(r"/_versions/latest_version_hint"), "hint"),
    (re.compile(r"/_versions/\.tmp"), "hint"),
    (re.compile(r"/_versions/[^>\"]*manifest"), "manifest"),
    (re.compile(r"/_versions[>\"]"), "manifest directory"),
    (re.compile(r"/_transactions/"), "transaction"),
    (re.compile(r"/data/"), "data file"),
    (re.compile(r"/data[>\"]"), "data directory"),
]
CLEAN_RUNS = 3
"""Without a fault. What all of them do are the steps of a commit: Lance writes a file in one piece or in two."""
ATTEMPTS = 100
CALLS_TRIED = 8
"""The fault hits one of so many first calls of a thread: on a busy machine a thread wakes others before it writes."""


def step_of(line: str, root: str) -> str | None:
    """Return the step of a commit in a line of strace's output, or None if the line is not about the log.

    >>> step_of('71 fsync(9</t/groups.lance/data>) = 0', "/t")
    'fsync data directory'
    """
    found = re.search(r"\b(\w+)\(", line)
    name = next((name for name, calls in CALLS.items() if found and found[1] in calls.split(",")), None)
    if name is None or root not in line:
        return None
    return next((f"{name} {place}" for pattern, place in PLACES if pattern.search(line)), None)


@dataclass
class Run:
    """What one run did and how it ended."""

    steps: list[str]
    hit: list[str]
    """The steps that the fault broke; empty if it hit no step of the commit."""
    sent: list[str]
    problems: list[str] = field(default_factory=list)


def second_append(root: str, start_pipe: int, errors: Path) -> Work:
    """Append g0, wait for a byte from `start_pipe`, append g1 and send the result. Then check that g0 can be read."""

    def work(send: Send) -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        allow_strace()
        with ExperienceLog.open(root) as log:
            log.append([make_group(0)])
            send("ready")
            os.read(start_pipe, 1)
            try:
                log.append([make_group(1)])
                send("acknowledged")
            except LogWriteError as error:
                send(f"LogWriteError {error!s:.200}")
            if log.read(["g0"]) != [make_group(0)]:
                send("FAILED g0 cannot be read by the process itself")

    return work


def examine(root: str, acknowledged: bool) -> list[str]:
    """Return what is wrong with a log after the fault: another process reads it, appends to it, and reads it again."""

    def work(send: Send) -> None:
        with ExperienceLog.open(root) as log:
            groups = list(log.groups())
            if groups not in ([make_group(0)], [make_group(0), make_group(1)]):
                send(f"FAILED found {[group.id for group in groups]} or torn content")
            if acknowledged and len(groups) != 2:
                send("FAILED an acknowledged group is lost")
            log.append([make_group(1)])
            if list(log.groups()) != [make_group(0), make_group(1)] or log.damaged():
                send("FAILED the log is not complete after the group was appended again")

    return run_to_end(work)


def run_once(inject: str | None, calls: str) -> Run:
    """Make one commit to a new log, with at most one fault."""
    with tempfile.TemporaryDirectory(prefix="offbeat-fault-") as place:
        root, report, errors = str(Path(place) / "log"), Path(place) / "strace.txt", Path(place) / "stderr.txt"
        start_read, start_write = os.pipe()
        pid, pipe = fork(second_append(root, start_read, errors))
        os.close(start_read)
        ready = os.read(pipe, 6)
        tracer = _attach(pid, report, inject, calls)
        os.write(start_write, b"g")
        os.close(start_write)
        sent = read_unless_stuck(pipe, pid, errors)
        os.waitpid(pid, 0)
        tracer.wait()
        lines = report.read_text().splitlines()
        acknowledged = "acknowledged" in sent
        run = Run([s for line in lines if (s := step_of(line, root))], _hit_steps(lines, root), sent)
        run.problems = [line for line in sent if line.startswith("FAILED")] if run.hit else []
        run.problems += [] if ready == b"ready\n" else ["FAILED the process did not start"]
        run.problems += examine(root, acknowledged)
        return run


def read_unless_stuck(pipe: int, pid: int, errors: Path) -> list[str]:
    """Return the lines that the process sends until it ends.

    A fault may hit a wake-up between Lance's threads, outside the log, where no storage can fail. Then Rust panics and
    the process would wait forever, so it is killed.
    """
    deadline = time.monotonic() + 30
    text = b""
    while True:
        if select.select([pipe], [], [], 0.05)[0]:
            part = os.read(pipe, 4096)
            if not part:
                break
            text += part
        elif time.monotonic() > deadline or "failed to wake" in errors.read_text():
            kill(pid)
    os.close(pipe)
    return [line for line in text.decode().split("\n") if line]


def _attach(pid: int, report: Path, inject: str | None, calls: str) -> "subprocess.Popen[bytes]":
    """Attach strace. Only the threads of Lance get broken writes, because other threads write to wake them up."""
    threads = threads_of(pid)
    if calls == CALLS["write"]:
        threads = [thread for thread in threads if (thread / "comm").read_text().startswith("lance")]
    options = ["-y", "-e", f"trace={','.join(CALLS.values())}"]
    return attach(pid, report, options + (["-e", f"inject={calls}:{inject}"] if inject else []), threads)


def _hit_steps(lines: list[str], root: str) -> list[str]:
    """Return the steps that the fault hit, each with its number among equal ones. A kill leaves its call unfinished."""
    seen: Counter[str] = Counter()
    hit: list[str] = []
    for line in lines:
        if step := step_of(line, root):
            seen[step] += 1
            if "(INJECTED)" in line or line.endswith(("<unfinished ...>", "= ?")):
                hit.append(f"{step} {seen[step]}")
    return hit


def every_fault() -> list[Figure]:
    """Row experience.3.faults: break a commit at every step with every fault."""
    clean = [run_once(None, "") for _ in range(CLEAN_RUNS)]
    always = reduce(and_, (Counter(run.steps) for run in clean))
    wanted = [f"{step} {n}" for step, count in always.items() for n in range(1, count + 1)]
    hits: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    endings: Counter[str] = Counter()
    problems = [problem for run in clean for problem in run.problems]
    runs = 0
    for fault, injection in FAULTS.items():
        for name, calls in CALLS.items():
            targets = {step for step in wanted if step.startswith(name + " ")}
            for attempt in range(ATTEMPTS * len(targets)):
                if targets <= set(hits[fault]):
                    break
                run = run_once(f"{injection}:when={1 + attempt % CALLS_TRIED}", calls)
                runs += 1
                problems += [f"{fault} at {run.hit}: {problem}" for problem in run.problems]
                hits[fault].update(run.hit)
                if run.hit:
                    endings[_ending(run)] += 1
    missed = [f"{fault} at {step}" for fault in FAULTS for step in wanted if not hits[fault][step]]
    for line in [*problems[:10], *missed]:
        print("  ", line)
    return [
        Figure(
            "experience.3.faults",
            "logs damaged, untyped errors or acknowledged groups lost after a fault at a step of a commit",
            "0, every step hit by every fault",
            len(problems),
            "runs",
            not problems and not missed,
            sum(sum(counter.values()) for counter in hits.values()),
            f"{len(wanted)} steps ({', '.join(wanted)}) × {', '.join(FAULTS)}; "
            f"{len(missed)} pairs not hit in {runs} runs; "
            + ", ".join(f"{count} × {ending}" for ending, count in endings.items()),
        )
    ]


def _ending(run: Run) -> str:
    if "acknowledged" in run.sent:
        return "acknowledged anyway"
    return "LogWriteError" if any(line.startswith("LogWriteError") for line in run.sent) else "killed"
