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

QUICK = SandboxLimits(seconds=1.0, memory_mb=96, processes=16)
# For programs that end by themselves: memory that others use makes a short program take seconds of CPU.
PATIENT = replace(QUICK, seconds=20.0)


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


def test_time_counts_from_the_programs_start(sandbox: Sandbox) -> None:
    seconds = []
    while not seconds or (seconds[-1] >= QUICK.seconds and len(seconds) < 5):  # again if the machine was busy
        seconds.append(run(sandbox, "import time; time.sleep(0.3)").seconds)
    assert 0.3 <= seconds[-1] < QUICK.seconds, seconds


def test_each_program_has_its_own_user(sandbox: Sandbox) -> None:
    uid = int(run(sandbox, "import os; print(os.getuid())").stdout)
    assert uid >= FIRST_UID if os.getuid() == 0 else uid != 0


def test_a_sandbox_killed_from_outside_is_not_the_programs_failure(sandbox: Sandbox) -> None:
    command = [sys.executable, "-c", _RUN_AND_REPORT, "import time; time.sleep(60)"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        bwrap, _ = _wait_for_descendants(started.pid)
        os.kill(bwrap, signal.SIGKILL)
        printed, _ = started.communicate(timeout=30)
    finally:
        started.kill()
        started.wait()
    assert "SandboxError" in printed


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
