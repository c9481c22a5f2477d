"""One commit of the experience log, broken by strace at each write, fsync, rename and link it makes.

A process opens a log, appends one group, and waits. strace attaches to it, set to inject one fault; then the process
appends a second group. strace counts calls per thread, and Lance spreads its calls over threads, so what a run hit is
read from strace's output, and runs are repeated until every step of a commit was hit by every fault.
"""

import ctypes
import os
import re
import select
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lab.figures import Figure
from lab.fixtures.groups import made
from lab.fixtures.processes import Say, Work, child, end, outcome
from offbeat.errors import LogWriteError
from offbeat.experience.log import ExperienceLog

CALLS = {
    "write": "write,pwrite64,writev",
    "fsync": "fsync,fdatasync",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
}
FAULTS = {"SIGKILL": "signal=SIGKILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}
PLACES = [  # what a path inside the log is, first match counts
    (re.compile(r"/_versions/latest_version_hint"), "hint"),
    (re.compile(r"/_versions/\.tmp"), "hint"),
    (re.compile(r"/_versions/[^>\"]*manifest"), "manifest"),
    (re.compile(r"/_versions[>\"]"), "manifest directory"),
    (re.compile(r"/_transactions/"), "transaction"),
    (re.compile(r"/data/"), "data file"),
    (re.compile(r"/data[>\"]"), "data directory"),
]
ATTEMPTS = 30
PTRACER, ANY_PROCESS = 0x59616D61, -1


def step_of(line: str, root: str) -> str | None:
    """Which step of a commit a line of strace's output is, or None if it has nothing to do with the log.

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
    struck: list[str]
    """The steps that were broken; none if the fault struck elsewhere or not at all."""
    said: list[str]
    problems: list[str] = field(default_factory=list)


def second_append(root: str, go: int, errors: Path) -> Work:
    """Append g0, wait for the word, append g1 and tell how it went; then look whether the log can still be read."""

    def work(say: Say) -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        ctypes.CDLL(None).prctl(PTRACER, ANY_PROCESS, 0, 0, 0)  # lets strace attach where only parents may
        with ExperienceLog.open(root) as log:
            log.append([made(0)])
            say("ready")
            os.read(go, 1)
            try:
                log.append([made(1)])
                say("acknowledged")
            except LogWriteError as error:
                say(f"LogWriteError {error!s:.200}")
            if log.read(["g0"]) != [made(0)]:
                say("FAILED g0 cannot be read by the process itself")

    return work


def examine(root: str, acknowledged: bool) -> list[str]:
    """What is wrong with a log after the fault: read by another process, appended to, read again."""

    def work(say: Say) -> None:
        with ExperienceLog.open(root) as log:
            groups = list(log.groups())
            if groups not in ([made(0)], [made(0), made(1)]):
                say(f"FAILED found {[group.id for group in groups]} or torn content")
            if acknowledged and len(groups) != 2:
                say("FAILED an acknowledged group is lost")
            log.append([made(1)])
            if list(log.groups()) != [made(0), made(1)] or log.damaged():
                say("FAILED appending again did not mend it")

    return outcome(work)


def run_once(inject: str | None, calls: str) -> Run:
    """One log, one commit, at most one fault."""
    with tempfile.TemporaryDirectory(prefix="offbeat-fault-") as place:
        root, report, errors = str(Path(place) / "log"), Path(place) / "strace.txt", Path(place) / "stderr.txt"
        go, send = os.pipe()
        pid, hear = child(second_append(root, go, errors))
        os.close(go)
        ready = os.read(hear, 6)
        tracer = _attach(pid, report, inject, calls)
        os.write(send, b"g")
        os.close(send)
        said = heard_unless_stuck(hear, pid, errors)
        os.waitpid(pid, 0)
        tracer.wait()
        lines = report.read_text().splitlines()
        acknowledged = "acknowledged" in said
        run = Run([s for line in lines if (s := step_of(line, root))], _struck(lines, root), said)
        run.problems = [line for line in said if line.startswith("FAILED")] if run.struck else []
        run.problems += [] if ready == b"ready\n" else ["FAILED the process did not start"]
        run.problems += examine(root, acknowledged)
        return run


def heard_unless_stuck(hear: int, pid: int, errors: Path) -> list[str]:
    """What the process says until it ends.

    A fault may strike outside the log, in a wake-up between Lance's threads, where no storage can fail: then Rust
    panics and the process would wait for ever. It is ended.
    """
    deadline = time.monotonic() + 30
    text = b""
    while True:
        if select.select([hear], [], [], 0.05)[0]:
            part = os.read(hear, 4096)
            if not part:
                break
            text += part
        elif time.monotonic() > deadline or "failed to wake" in errors.read_text():
            end(pid)
    os.close(hear)
    return [line for line in text.decode().split("\n") if line]


def _attach(pid: int, report: Path, inject: str | None, calls: str) -> "subprocess.Popen[bytes]":
    """strace on the threads that matter: to break writes only Lance's, as others write to wake them up."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    if calls == CALLS["write"]:
        tasks = [task for task in tasks if (task / "comm").read_text().startswith("lance")]
    threads = [option for task in tasks for option in ("-p", task.name)]
    options = ["-e", f"inject={calls}:{inject}"] if inject else []
    tracer = subprocess.Popen(
        ["strace", "-y", "-qq", "-e", f"trace={','.join(CALLS.values())}", *options, "-o", str(report), *threads],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if all("TracerPid:\t0" not in (task / "status").read_text() for task in tasks):
            return tracer
        time.sleep(0.005)
    raise SystemExit("strace could not attach; is ptrace allowed here?")


def _struck(lines: list[str], root: str) -> list[str]:
    """The steps, each with its number among equal ones, that the fault struck. A kill leaves its call unfinished."""
    seen: Counter[str] = Counter()
    struck: list[str] = []
    for line in lines:
        if step := step_of(line, root):
            seen[step] += 1
            if "(INJECTED)" in line or line.endswith(("<unfinished ...>", "= ?")):
                struck.append(f"{step} {seen[step]}")
    return struck


def every_fault() -> list[Figure]:
    """Break a commit at every step by every fault."""
    clean = run_once(None, "")
    wanted = [f"{step} {n}" for step, count in Counter(clean.steps).items() for n in range(1, count + 1)]
    hits: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    endings: Counter[str] = Counter()
    problems = list(clean.problems)
    runs = 0
    for fault, injection in FAULTS.items():
        for name, calls in CALLS.items():
            targets = {step for step in wanted if step.startswith(name + " ")}
            for attempt in range(ATTEMPTS * len(targets)):
                if targets <= set(hits[fault]):
                    break
                run = run_once(f"{injection}:when={1 + attempt % 4}", calls)
                runs += 1
                problems += [f"{fault} at {run.struck}: {problem}" for problem in run.problems]
                hits[fault].update(run.struck)
                if run.struck:
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
    if "acknowledged" in run.said:
        return "acknowledged all the same"
    return "LogWriteError" if any(line.startswith("LogWriteError") for line in run.said) else "killed"
