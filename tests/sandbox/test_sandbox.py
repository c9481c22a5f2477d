"""Model-written programs run, are stopped, and do not escape; a failure of the sandbox is not one of the program."""

import ctypes
import ctypes.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench import sandbox as bench_sandbox
from offbeat.errors import SandboxError, SandboxMissing
from offbeat.sandbox import ProgramOutcome, Sandbox, SandboxLimits, bubblewrap, jail, open_sandbox
from offbeat.sandbox.bubblewrap import Bubblewrap
from offbeat.sandbox.cgroups import FIRST_UID, Cgroup, Slots, Version2, find_groups
from tests.fixtures.attacks import sandbox_programs

QUICK = SandboxLimits(seconds=1.0, memory_mb=96, processes=16, idle_seconds=1.0)
# For programs that end by themselves: memory that others use makes a short program take seconds of CPU.
PATIENT = replace(QUICK, seconds=20.0, idle_seconds=20.0)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox()
    except SandboxMissing as missing:
        pytest.skip(f"no sandbox: {missing}")


def run(sandbox: Sandbox, program: str, stdin: bytes = b"", limits: SandboxLimits = PATIENT) -> ProgramOutcome:
    return sandbox.run(program, stdin, limits)


def test_a_function_is_called_with_each_set_of_arguments(sandbox: Sandbox) -> None:
    calls = [((2,), {}), ((3,), {"times": 3})]
    outcome = sandbox.call("def f(x, times=2): return (x * times, {x})", "f", calls, PATIENT)
    assert outcome.ending == "finished"
    assert outcome.answers == ({"tuple": [4, {"set": [2]}]}, {"tuple": [9, {"set": [3]}]})


def test_a_script_reads_its_input_and_prints(sandbox: Sandbox) -> None:
    text = b"line\n" * 100_000  # more than a pipe holds, in both directions
    outcome = run(sandbox, "import sys\nprint(len(sys.stdin.read()))\nprint('x' * 500_000)", text)
    assert outcome.ending == "finished"
    assert outcome.stdout == b"500000\n" + b"x" * 500_000 + b"\n"


@pytest.mark.parametrize(
    "program",
    [
        "import io, os; print(len(io.BytesIO(os.read(0, os.fstat(0).st_size)).readline()))",
        "import os; print(len(os.read(0, 10**6)))",
        "import mmap; print(len(mmap.mmap(0, 0).readline()))",
        "import sys; sys.stdin.read(); sys.stdin.seek(0); print(len(sys.stdin.readline()))",
        "print(len(input()) + 1)",
        "print(len(open(0, 'rb').read()))",
    ],
)
def test_the_standard_input_of_a_script_is_a_file(program: str) -> None:
    for backend in ("bubblewrap", "bubblewrap-without-cgroups"):
        try:
            outcome = run(open_sandbox(backend), program, b"x" * 299_999 + b"\n")
        except SandboxMissing as missing:
            pytest.skip(f"no sandbox: {missing}")
        assert outcome.stdout == b"300000\n", outcome


def test_a_script_gets_no_memory_from_its_standard_input(sandbox: Sandbox) -> None:
    """It can be larger than the memory of the program, and the program cannot enlarge it or make another."""
    outcome = run(sandbox, f"import os; print(os.fstat(0).st_size)\n{_ENLARGE}", bytes(QUICK.memory_mb << 20))
    assert outcome.stdout.split() == [str(QUICK.memory_mb << 20).encode()] + [b"refused"] * 4, outcome


@pytest.mark.parametrize("backend", ["bubblewrap", "bubblewrap-without-cgroups"])
@pytest.mark.parametrize(
    "body",
    [
        "with multiprocessing.Pool(2) as pool: return sum(pool.map(square, range(n)))",
        "with concurrent.futures.ProcessPoolExecutor(2) as pool: return sum(pool.map(square, range(n)))",
        "queue = multiprocessing.Queue()\n"
        "    workers = [multiprocessing.Process(target=put, args=(queue, i)) for i in range(n)]\n"
        "    for one in workers: one.start()\n"
        "    total = sum(queue.get() for _ in workers)\n"
        "    for one in workers: one.join()\n"
        "    return total",
    ],
    ids=["Pool", "ProcessPoolExecutor", "Process and Queue"],
)
def test_a_program_may_compute_in_several_processes(backend: str, body: str) -> None:
    program = f"{_SEVERAL}def f(n):\n    {body}\n"
    try:
        several = open_sandbox(backend)
    except SandboxMissing as missing:
        pytest.skip(f"no sandbox: {missing}")
    called = several.call(program, "f", [((4,), {}), ((3,), {})], PATIENT)
    assert called.answers == (14, 5), called
    script = several.run(f"{program}if __name__ == '__main__':\n    print(f(int(input())))", b"4\n", PATIENT)
    assert script.stdout == b"14\n", script


def test_shared_memory_counts_as_files(sandbox: Sandbox) -> None:
    """Otherwise a program without control groups would have two places to fill."""
    outcome = run(sandbox, _FILL, limits=replace(PATIENT, files_mb=2))
    assert outcome.stdout == b"4 full\n", outcome


_SEVERAL = """
import concurrent.futures, multiprocessing
def square(x): return x * x
def put(queue, x): queue.put(square(x))
"""


_FILL = """
written = 0
try:
    for place in ("/dev/shm", "/tmp"):
        for i in range(3):
            with open(f"{place}/{place[1:4]}{i}", "wb") as file: file.write(bytes(1 << 19))
            written += 1
except OSError as error:
    print(written, "full" if error.errno == 28 else error)
"""


def test_a_function_gets_no_descriptors_but_those_of_the_driver(sandbox: Sandbox) -> None:
    outcome = sandbox.call(_DESCRIPTORS, "find", [((), {})], PATIENT)
    assert outcome.answers == ([0, 1, 2, 3, 4, 5],), outcome


_DESCRIPTORS = """
import os
def find():
    found = []
    for number in range(1024):
        try: os.fstat(number); found.append(number)
        except OSError: pass
    return found
"""


_ENLARGE = """
def at_the_end(): os.lseek(0, 0, 2); os.write(0, b"x")
def allocate(): os.posix_fallocate(0, 0, 1 << 30)
for attempt in (at_the_end, allocate, lambda: os.ftruncate(0, 1 << 30), lambda: os.memfd_create("more")):
    try: attempt()
    except OSError: print("refused")
"""


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("1 / 0", "crashed"),
        ("this is not Python", "crashed"),
        ("import sys; sys.exit(3)", "crashed"),
        ("import os; os.abort()", "crashed"),
        ("import os; os._exit(137)", "crashed"),
        ("import os; os.kill(os.getpid(), 9)", "crashed"),
        ("while True: pass", "timeout"),
        ("import os, time\nfor n in range(3): os.close(n)\ntime.sleep(60)", "timeout"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"),
        ("while True: print('x' * 10_000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10_000)", "output"),
    ],
)
def test_the_outcome_says_how_a_program_failed(sandbox: Sandbox, program: str, ending: str) -> None:
    limits = QUICK if ending == "timeout" else PATIENT
    assert run(sandbox, program, limits=limits).ending == ending


def test_a_program_that_exits_before_it_answers_has_crashed(sandbox: Sandbox) -> None:
    outcome = sandbox.call("import sys\ndef f(): sys.exit(0)", "f", [((), {})], PATIENT)
    assert (outcome.ending, outcome.answers) == ("crashed", ())


def test_the_start_and_the_end_of_the_sandbox_cost_a_program_nothing(sandbox: Sandbox) -> None:
    outcomes = [run(sandbox, "pass") for _ in range(20)]
    assert [outcome.ending for outcome in outcomes] == ["finished"] * 20
    assert sum(outcome.seconds + outcome.idle_seconds for outcome in outcomes) < 0.05


SPIN_A_WHILE = """
import time
def work(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds: pass
    return seconds
"""


def test_each_call_has_its_own_limit_and_all_together_another(sandbox: Sandbox) -> None:
    limits, calls = replace(QUICK, total_seconds=1.6), [((0.4,), {})] * 4  # where CPUs are crowded, they count less
    outcome = sandbox.call(SPIN_A_WHILE, "work", calls, replace(limits, total_seconds=30.0))
    assert outcome.ending == "finished" and outcome.seconds > 0.7, outcome
    outcome = sandbox.call(SPIN_A_WHILE, "work", [*calls[:2], ((60.0,), {})], limits)
    assert outcome.ending == "timeout" and len(outcome.answers) == 2, outcome
    outcome = sandbox.call(SPIN_A_WHILE, "work", calls * 9, limits)
    assert outcome.ending == "timeout" and 1.5 < outcome.seconds < 2.5, outcome


@pytest.mark.parametrize(
    ("program", "counts"),
    [
        ("import time\ndef f(n): time.sleep(0.4); return n", "idle_seconds"),
        ("import time\ndef f(n):\n    for _ in range(40): time.sleep(0.01)\n    return n", "idle_seconds"),
        ("import os, signal\ndef f(n): os.fork() or os.kill(os.getpid(), signal.SIGSTOP); os.wait()", "idle_seconds"),
        ("import os, time\nif os.fork() == 0:\n    while True: pass\ndef f(n): time.sleep(0.05); return n", "seconds"),
        (
            "import os, time\nleft = 9\ndef f(n):\n    global left\n    left -= 1\n"
            "    if left > 0 and os.fork() == 0:\n        while True: pass\n    time.sleep(0.05); return n",
            "seconds",
        ),
    ],
    ids=["sleeps in each test", "wakes to look busy", "stops itself", "computes in a child", "a child in each test"],
)
def test_a_program_with_many_tests_cannot_stay_beyond_its_limits(sandbox: Sandbox, program: str, counts: str) -> None:
    limits = replace(QUICK, processes=64, total_seconds=1.0, idle_seconds=1.0 if counts == "idle_seconds" else 60.0)
    outcome = sandbox.call(program, "f", [((7,), {})] * 500, limits)
    assert outcome.ending == "timeout" and 0.9 < getattr(outcome, counts) < 3.0, outcome


def test_each_program_has_its_own_user(sandbox: Sandbox) -> None:
    uid = int(run(sandbox, "import os; print(os.getuid())").stdout)
    assert uid >= FIRST_UID if os.getuid() == 0 else uid != 0


def test_a_sandbox_killed_from_outside_is_not_the_programs_failure_and_the_program_runs_again(sandbox: Sandbox) -> None:
    command = [sys.executable, "-c", _RUN_AND_REPORT, "import time; time.sleep(5); print('ran')"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        bwrap, _ = _wait_for_descendants(started.pid)
        os.kill(bwrap, signal.SIGKILL)
        printed, _ = started.communicate(timeout=30)
    finally:
        started.kill()
        started.wait()
    assert "finished" in printed and "ran" in printed, printed


def test_a_running_program_dies_with_the_process_that_scores(sandbox: Sandbox) -> None:
    scoring = subprocess.Popen([sys.executable, "-c", _RUN_AND_REPORT, "import time; time.sleep(60)"])
    _, inner = _wait_for_descendants(scoring.pid)
    scoring.kill()
    scoring.wait()
    until = time.monotonic() + 10
    while _alive(inner) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _alive(inner)


_RUN_AND_REPORT = """
import sys
from offbeat.sandbox import SandboxLimits, open_sandbox
from offbeat.errors import SandboxError
try:
    print(open_sandbox().run(sys.argv[1], b"", SandboxLimits(seconds=30)))
except SandboxError as error:
    print("SandboxError", error)
"""


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for_descendants(pid: int) -> tuple[int, int]:
    """Return the pids of bwrap and of process 1 in the sandbox, after the program has had time to start."""
    until = time.monotonic() + 30
    since: dict[int, float] = {}
    while time.monotonic() < until:
        for child in _children(pid):
            for inner in _children(child):
                # The sandbox tests itself with a short program first; the one that stays is the program.
                if time.monotonic() - since.setdefault(inner, time.monotonic()) > 1.0:
                    return child, inner
        time.sleep(0.05)
    raise AssertionError("the program did not start")


def test_without_bubblewrap_nothing_runs_and_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail.shutil, "which", lambda name, path: None)
    with pytest.raises(SandboxMissing, match="apt-get install bubblewrap"):
        Bubblewrap()


def test_a_bubblewrap_that_does_not_work_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "_tool", lambda name, package: "/bin/false")
    with pytest.raises(SandboxMissing, match="does not work here"):
        Bubblewrap()


def test_a_sandbox_that_does_not_isolate_is_refused(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "_SELF_TEST", "def look(): return [0, ['SECRET'], True, True, ['x']]")
    with pytest.raises(SandboxMissing, match="does not isolate"):
        Bubblewrap()


def test_without_control_groups_it_refuses_unless_you_choose_otherwise(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxMissing, match="bubblewrap-without-cgroups"):
        find_groups("22 1 0:20 / /proc rw - proc proc rw")
    each = open_sandbox("bubblewrap-without-cgroups")
    outcome = each.run("x = []\nwhile True: x.append(bytearray(1 << 20))", b"", PATIENT)
    assert outcome.ending == "crashed" and "MemoryError" in outcome.detail


def test_version_1_groups_are_found_by_their_mounts(tmp_path: Path) -> None:
    mounts = "".join(
        f"3{n} 1 0:3{n} / {tmp_path / name} rw - cgroup cgroup rw,{name}\n" for n, name in enumerate(("memory", "pids"))
    )
    group = find_groups(mounts).group("slot-0")
    assert group.places == (tmp_path / "memory/offbeat-sandbox/slot-0", tmp_path / "pids/offbeat-sandbox/slot-0")


def unified(tmp_path: Path, controllers: str) -> str:
    """Make a tree like that of a systemd machine, with this process in user.slice/session.scope."""
    own = tmp_path / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    for folder in (tmp_path, own.parent, own):
        (folder / "cgroup.subtree_control").write_text(controllers if folder != own else "")
        (folder / "cgroup.procs").write_text("")
    return f"30 1 0:30 / {tmp_path} rw - cgroup2 cgroup rw\n"


def kernel_files(place: Path) -> None:
    """Write the files that the kernel puts into a new group."""
    for name in ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs", "cpu.weight.nice", "cpu.idle"):
        (place / name).write_text("")
    (place / "pids.current").write_text("0\n")
    (place / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 2000000\n")
    (place / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")


def test_version_2_groups_are_made_beside_the_own_group_and_capped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_kernel_files(monkeypatch)
    groups = find_groups(unified(tmp_path, "cpu memory pids"), "0::/user.slice/session.scope\n")
    assert groups == Version2(tmp_path / "user.slice", shares=True)
    group = groups.group("slot-3")
    group.cap(64 << 20, 18)
    group.share_cpu()
    place = tmp_path / "user.slice" / "offbeat-sandbox-slot-3"
    assert group.places == (place,)
    assert (place / "memory.max").read_text() == str(64 << 20)
    assert (place / "memory.swap.max").read_text() == "0"
    assert (place / "pids.max").read_text() == "18"
    assert (group.out_of_memory().limit_hits, group.out_of_memory().kills) == (7, 1)
    idle = os.sched_getscheduler(0) == os.SCHED_IDLE
    assert (place / "cpu.idle").read_text() == str(int(idle))
    assert (place / "cpu.weight.nice").read_text() == ("" if idle else str(os.getpriority(os.PRIO_PROCESS, 0)))
    assert group.cpu_seconds() == 2.5


def test_version_2_groups_without_cpu_shares_are_used_for_their_caps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_kernel_files(monkeypatch)
    groups = find_groups(unified(tmp_path, "memory pids"), "0::/user.slice/session.scope\n")
    assert groups == Version2(tmp_path / "user.slice", shares=False)
    groups.group("slot-0").share_cpu()
    assert (tmp_path / "user.slice" / "offbeat-sandbox-slot-0" / "cpu.idle").read_text() == ""


def test_in_a_delegated_group_the_callers_move_into_a_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_kernel_files(monkeypatch)
    mounts = unified(tmp_path, "")
    own = tmp_path / "user.slice" / "session.scope"
    (own / "cgroup.procs").write_text("4711\n")
    assert find_groups(mounts, "0::/user.slice/session.scope\n") == Version2(own, shares=True)
    assert (own / "offbeat-callers" / "cgroup.procs").read_text() == "4711"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def _with_kernel_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give new folders in the tree the files of the kernel, and let them be removed with those files."""
    make, remove = Path.mkdir, Path.rmdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        make(path, mode, parents, exist_ok)
        if path.name.startswith("offbeat"):
            kernel_files(path)

    def rmdir(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        remove(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)


def test_killing_a_version_2_group_ends_its_processes() -> None:
    mount = next((p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if _writable_v2(p)), None)
    if mount is None:
        pytest.skip("no writable cgroup of version 2")
    place = mount / f"offbeat-test-{os.getpid()}"
    place.mkdir()
    group = Cgroup(place, place)
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        (place / "cgroup.procs").write_text(str(sleeper.pid))
        assert group.processes() == [sleeper.pid]
        group.kill()
        assert sleeper.wait(10) == -signal.SIGKILL
        assert group.processes() == []
    finally:
        sleeper.kill()
        sleeper.wait()
        group.remove()


def _writable_v2(path: Path) -> bool:
    return (path / "cgroup.controllers").exists() and os.access(path, os.W_OK)


def test_a_slot_is_held_by_one_process_and_released_when_it_dies(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib\nfrom offbeat.sandbox.cgroups import Slots\n"
        "with Slots(pathlib.Path(sys.argv[1])).one() as slot:\n    print(slot.number, flush=True)\n    sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "0\n"
        with Slots(tmp_path).one() as slot:
            assert slot.number == 1
        other.kill()
    with Slots(tmp_path).one() as slot:
        assert slot.number == 0


@pytest.mark.filterwarnings("ignore:lance is not fork-safe")  # other tests import it; the child does not use it
def test_a_forked_child_does_not_use_its_parents_slots(tmp_path: Path) -> None:
    slots = Slots(tmp_path)
    with slots.one():
        pass
    child = os.fork()
    if child == 0:
        with slots.one() as slot:
            os._exit(slot.number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    with slots.one() as slot:
        assert slot.number == 0
    slots.close()


def test_system_call_numbers_are_those_of_libseccomp() -> None:
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(name).seccomp_syscall_resolve_name_arch
    for machine, architecture in (("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)):
        for call, number in jail.numbers(machine).items():
            assert resolve(ctypes.c_uint32(architecture), call.encode()) == number, (machine, call)


def test_a_failure_that_may_be_the_machines_is_tried_again(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [
        SandboxError("fork failed"),
        ProgramOutcome("crashed", detail="BlockingIOError: [Errno 11] Resource temporarily unavailable"),
        ProgramOutcome("crashed", detail="RuntimeError: can't start new thread"),
        ProgramOutcome("memory", detail="it used more memory than its limit"),
    ]
    run_once = Bubblewrap._run
    for failure in failures:
        left = [failure]

        def fail_once(*given: object, left: list[SandboxError | ProgramOutcome] = left) -> ProgramOutcome:
            if not left:
                return run_once(*given)  # type: ignore[arg-type]
            if isinstance(left[0], SandboxError):
                raise left.pop()
            return left.pop()  # type: ignore[return-value]

        monkeypatch.setattr(Bubblewrap, "_run", fail_once)
        assert run(sandbox, "print(1)").stdout == b"1\n", failure
    monkeypatch.undo()
    assert run(sandbox, "raise MemoryError").ending == "crashed"


def test_some_attacks_fail_and_the_witness_would_notice(sandbox: Sandbox) -> None:
    names = {"environment", "a secret file by its path", "TCP to the host", "signal the parent", "new user namespace"}
    chosen = [attack for attack in bench_sandbox.ATTACKS if attack.name in names]
    with bench_sandbox.witness(slots=1) as observer:
        for attack in chosen:
            assert bench_sandbox.run_attack(observer, attack, sandbox) == []
    assert not bench_sandbox.is_missed(chosen[-1])


@pytest.mark.engine
def test_no_attack_escapes_and_the_witness_would_notice(sandbox: Sandbox) -> None:
    assert len(bench_sandbox.ATTACKS) >= 40
    assert bench_sandbox.attacks(short=True)


@pytest.mark.engine
def test_correct_programs_pass_beside_attacks(sandbox: Sandbox) -> None:
    assert bench_sandbox.mixed(short=True)


@pytest.mark.parametrize("problem", sandbox_programs.HONEST, ids=lambda p: p.name)
def test_an_honest_program_passes(sandbox: Sandbox, problem: sandbox_programs.Problem) -> None:
    assert bench_sandbox.verdict(problem, SandboxLimits()).why == ""


def test_a_hosted_sandbox_is_chosen_by_its_factory() -> None:
    assert isinstance(open_sandbox("test_hosted_sandbox:Hosted"), Hosted)


class Hosted:
    """A sandbox on another machine."""

    def call(self, program: str, function: str, calls: object, limits: SandboxLimits) -> ProgramOutcome:
        raise SandboxError("the service did not answer")

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        raise SandboxError("the service did not answer")


@pytest.fixture(autouse=True)
def hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_hosted_sandbox", sys.modules[__name__])
