"""Programs pay for CPU, test by test, and for nothing that the machine does."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from offbeat.errors import SandboxMissing
from offbeat.sandbox import SandboxLimits, open_sandbox
from offbeat.sandbox.meter import descendants
from offbeat.tasks.code_tests import parse
from offbeat.tasks.python_code import judge

HALF_A_SECOND = """
import time
def work(n):
    began = time.process_time()
    while time.process_time() - began < 0.5: pass
    return n
"""


@pytest.fixture(scope="module", autouse=True)
def sandboxed() -> None:
    try:
        open_sandbox()
    except SandboxMissing as missing:
        pytest.skip(f"no sandbox: {missing}")


def why(program: str, tests: list[object], seconds: float) -> str:
    """Return why a program fails; empty if it passes."""
    return judge(program, parse(tests), open_sandbox(), SandboxLimits(seconds=seconds)).why  # type: ignore[arg-type]


def test_two_hundred_short_scripts_are_as_fair_as_two() -> None:
    """Each needs milliseconds; what starts and ends around them is not theirs to pay."""
    script: list[object] = [{"stdin": "3 4", "stdout": "7"}]
    assert why("print(sum(map(int, input().split())))", script * 2, 0.4) == ""
    assert why("print(sum(map(int, input().split())))", script * 200, 0.4) == ""


def test_each_test_has_its_own_limit() -> None:
    tests: list[object] = [{"call": "work", "args": [n], "result": n} for n in range(5)]
    assert why(HALF_A_SECOND, tests, 1.0) == ""


def test_a_program_that_the_machine_stops_has_not_used_its_time() -> None:
    """All processes of the sandbox are stopped for twice the limit, and continue."""
    over, stopped = threading.Event(), []

    def stop_for_a_while() -> None:
        while not over.is_set() and not stopped:
            found = descendants(os.getpid())
            if len(found) < 3:  # bwrap, its process 1 and the interpreter
                time.sleep(0.01)
                continue
            time.sleep(0.3)
            stopped.extend(found)
            for number, pause in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 0.0)):
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                over.wait(pause)

    machine = threading.Thread(target=stop_for_a_while)
    machine.start()
    try:
        found = why("import time\ntime.sleep(0.8)\nprint(1)", [{"stdin": "", "stdout": "1"}], 1.0)
    finally:
        over.set()
        machine.join()
    assert found == "" and len(stopped) >= 3


JUDGE_IN_A_BUSY_PROCESS = """
import sys, threading, time
from offbeat.sandbox import SandboxLimits, open_sandbox
sandbox = open_sandbox()
print("ready", flush=True)
print(sandbox.run("import time; time.sleep(0.6); print(1)", b"", SandboxLimits(seconds=1.0)).ending, flush=True)
"""


def test_a_program_does_not_pay_for_a_stop_of_the_process_that_judges_it() -> None:
    """The process that judges and the program are stopped together, as by a laptop's lid or a paused container."""
    command = [sys.executable, "-c", JUDGE_IN_A_BUSY_PROCESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as judging:
        assert judging.stdout is not None and judging.stdout.readline() == "ready\n"
        time.sleep(0.3)
        tree = [judging.pid, *descendants(judging.pid)]
        for number, pause in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0.0)):
            for pid in tree:
                os.kill(pid, number)
            time.sleep(pause)
        assert judging.stdout.readline() == "finished\n"


UNREAPED = """
import ctypes
from offbeat.sandbox import SandboxLimits, open_sandbox
ctypes.CDLL(None).prctl(36, 1)  # what a program leaves behind comes here, and nobody takes note of it
sandbox = open_sandbox()
for _ in range(60):
    assert sandbox.run("print(1)", b"", SandboxLimits()).ending == "finished"
threads = "import threading, time\\nfor _ in range(8): threading.Thread(target=time.sleep, args=(0.5,)).start()"
print(sandbox.run(threads, b"", SandboxLimits()).ending)
"""


def test_what_earlier_programs_leave_behind_takes_no_process_from_the_next() -> None:
    """An init that never reaps, as in many containers: ended processes stay in the control group of the slot."""
    ended = subprocess.run([sys.executable, "-c", UNREAPED], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "finished\n", ended.stdout + ended.stderr
