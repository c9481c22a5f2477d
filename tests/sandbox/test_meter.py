"""The meter tells a program that computes or sleeps from one that waits for a CPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from offbeat.errors import SandboxError, SandboxMissing, SandboxStarved
from offbeat.sandbox import Sandbox, SandboxLimits, bubblewrap, meter, open_sandbox
from offbeat.sandbox.meter import SAMPLE_SECONDS, TreeMeter, Usage, descendants

SPIN = "while True: pass"


@contextmanager
def started(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program], start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # with what it forked
        process.wait()


def measure(program: str, enough: Callable[[Usage], bool]) -> Usage:
    """Measure a program until it has received enough, or for a minute."""
    with started(program) as process:
        tree, until = TreeMeter(process.pid), time.monotonic() + 60
        while not enough(usage := tree.read()) and time.monotonic() < until:
            time.sleep(SAMPLE_SECONDS)
    return usage


def test_a_program_that_computes_pays_for_its_cpu_in_all_processes() -> None:
    usage = measure(f"import os\nos.fork()\n{SPIN}", lambda usage: usage.cpu > 0.4)
    assert usage.cpu > 0.4 and usage.idle < 0.4, usage


def test_a_program_that_sleeps_is_idle() -> None:
    usage = measure("import time; time.sleep(60)", lambda usage: usage.idle > 0.5)
    assert usage.cpu < 0.4 < usage.idle <= usage.wall


def test_a_program_that_has_no_cpu_is_not_idle_and_pays_less() -> None:
    """Two programs on one CPU with the lowest priority, beside as many with the highest one that can be had."""
    cpu = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\n"
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(started(pinned + SPIN))
        time.sleep(0.5)
        usage = measure(pinned + idle + SPIN, lambda usage: usage.wall > 3.0)
    assert usage.waited > 0.5 * usage.wall and usage.idle < 0.5 * usage.wall and usage.price < 1.0, usage


VFORK = "import ctypes, os, time\nif ctypes.CDLL(None).vfork() == 0:\n    time.sleep(60)\n    os._exit(0)"
"""Waits inside the kernel, for its child."""


def test_a_program_cannot_look_starved_by_waiting_for_its_own_child() -> None:
    usage = measure(VFORK, lambda usage: usage.idle > 1.0)
    assert usage.idle > 1.0 and usage.waited < 0.5 * usage.wall, usage


def test_a_wait_inside_the_kernel_counts_as_one_for_a_cpu_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_children", lambda pid, tid: [])  # as if it waited for the lock of another process
    monkeypatch.setattr(meter, "MOST_BLOCKED", 1.0)
    usage = measure(VFORK, lambda usage: usage.wall > 3.0)
    assert 0.9 < usage.waited < 2.0 and usage.idle > 1.0, usage


def test_a_tree_that_the_machine_stops_is_not_idle() -> None:
    with started("import time; time.sleep(60)") as process:
        tree = TreeMeter(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(8):
            time.sleep(SAMPLE_SECONDS)
            usage = tree.read()
        assert usage.wall > 0.8 and usage.idle < 0.15, usage


def test_a_child_that_its_own_program_stops_is_idle() -> None:
    program = "import os, signal, time\nif os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)"
    usage = measure(program, lambda usage: usage.idle > 0.5)
    assert usage.idle > 0.5 > usage.waited, usage


def test_a_meter_that_looks_late_does_not_make_a_program_idle() -> None:
    with started("import time; time.sleep(60)") as process:
        tree = TreeMeter(process.pid)
        time.sleep(1.0)
        usage = tree.read()
    assert usage.wall > 1.0 and usage.idle < 3 * SAMPLE_SECONDS, usage


def test_children_that_ended_still_count() -> None:
    usage = measure(
        "import os\nwhile True:\n    if os.fork() == 0:\n        sum(range(3_000_000)); os._exit(0)\n    os.wait()",
        lambda usage: usage.cpu > 0.4,
    )
    assert usage.cpu > 0.4


def test_descendants_are_found_at_any_depth() -> None:
    with started("import os, time\nos.fork() or os.fork()\ntime.sleep(60)") as process:
        until = time.monotonic() + 20
        while len(found := descendants(process.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(found) == 2 and process.pid not in found


@pytest.fixture(scope="module", params=["bubblewrap", "bubblewrap-without-cgroups"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    try:
        return open_sandbox(request.param)
    except SandboxMissing as missing:
        pytest.skip(f"no sandbox: {missing}")


def test_a_program_is_stopped_after_the_cpu_of_all_its_processes(sandbox: Sandbox) -> None:
    limits = SandboxLimits(seconds=1.0, processes=16)
    outcome = sandbox.run(f"import os\n[os.fork() for _ in range(3)]\n{SPIN}", b"", limits)
    assert outcome.ending == "timeout" and outcome.seconds >= 1.0


def test_a_program_cannot_look_starved_by_children_that_nobody_counts(sandbox: Sandbox) -> None:
    """Its children end at once, and their time is lost because nobody waits for them."""
    program = (
        "import os, signal\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "for _ in range(20):\n"
        "    try:\n        if os.fork() == 0: break\n"
        "    except OSError: pass\n"  # its children may already have used up its processes
        "while True:\n"
        "    try:\n        if os.fork() == 0:\n            sum(range(20_000)); os._exit(0)\n"
        "    except OSError: pass\n"
    )
    outcome = sandbox.run(program, b"", SandboxLimits(seconds=2.0))
    assert outcome.ending == "timeout"


def test_a_program_with_many_processes_counts_as_starved_only_if_all_of_them_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = meter._Wait(ended=10**9)  # a wait of a second ended at every look
    monkeypatch.setattr(meter.TreeMeter, "_look", lambda *_: ended)
    few, many = meter.MANY_PROCESSES, meter.MANY_PROCESSES + 1
    for highest, exact, starved in [(few, None, True), (many, None, False), (many, lambda: 0.0, True)]:
        monkeypatch.setattr(meter, "_pid_in_namespace", lambda pid, highest=highest: highest)
        assert (TreeMeter(os.getpid(), exact).read().waited > 0) == starved


def test_a_starved_program_is_run_twice_again_and_is_then_no_failure_of_the_program(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def starved(_: TreeMeter) -> Usage:
        looks.append(time.monotonic())
        return Usage(wall=1e9, cpu=0.1, waited=1e9 - 0.1)

    monkeypatch.setattr(bubblewrap.TreeMeter, "read", starved)
    monkeypatch.setattr(bubblewrap.TreeMeter, "__init__", lambda *_: None)
    with pytest.raises(SandboxStarved, match=r"too busy to judge a program: it received 0\.10 s of CPU"):
        sandbox.run(SPIN, b"", SandboxLimits(seconds=1.0))
    assert len(looks) == 3 and issubclass(SandboxStarved, SandboxError)


def test_a_program_cannot_make_a_session_or_change_its_priority(sandbox: Sandbox) -> None:
    for call in ("os.setsid()", "os.setpriority(os.PRIO_PROCESS, 0, 19)"):
        program = (
            f"import os\nif os.fork(): os.wait()\nelse:\n    try: {call}\n    except OSError as error: print(error)"
        )
        outcome = sandbox.run(program, b"", SandboxLimits(20.0))
        assert b"Function not implemented" in outcome.stdout, outcome


def test_the_group_of_a_slot_has_its_own_share(tmp_path: Path) -> None:
    from offbeat.sandbox.cgroups import Version1, find_groups

    try:
        groups = find_groups()
    except SandboxMissing as missing:
        pytest.skip(f"no control groups: {missing}")
    if not isinstance(groups, Version1) or groups.cpu is None:
        pytest.skip("no CPU shares of version 1")
    first, second = groups.group("test-a"), groups.group("test-b")
    try:
        assert first.cpu is not None and second.cpu is not None and first.cpu.parent == second.cpu.parent == groups.cpu
        before = first.cpu_seconds()
        with started(SPIN) as process:
            for place in first.places:
                (place / "cgroup.procs").write_text(str(process.pid))
            until = time.monotonic() + 30
            while first.cpu_seconds() - before < 0.1 and time.monotonic() < until:
                time.sleep(0.02)
            assert first.cpu_seconds() - before >= 0.1
            first.kill()
    finally:
        first.remove()
        second.remove()
