"""`offbeat doctor --gpu`: every check passes on a right machine, and fails when its fault is injected."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offbeat import api
from offbeat.cli.main import app
from offbeat.errors import DeadlinePassed, RunError
from offbeat.placement.hardware import Hardware
from offbeat.preflight.gpu import attention, copies, engines, once, ranks, session
from offbeat.preflight.gpu.child import ChildFailed, DoctorChild, descendants, is_running
from offbeat.preflight.gpu.engine_trial import span_problems
from offbeat.preflight.gpu.finding import GpuFinding, broken, passed, skipped
from offbeat.preflight.gpu.session import UNITS, DoctorSession, run_units, timed
from offbeat.preflight.gpu.training import judge_training
from offbeat.rollout.hf import HfEngine
from offbeat.trainer import flex
from offbeat.types import Completion, Json, VersionSpan
from tests.fixtures import gpu_faults

run = CliRunner(env={"COLUMNS": "200"}).invoke


def broken_of(findings: list[GpuFinding]) -> list[str]:
    for finding in findings:
        assert not finding.broken or (finding.fix and finding.detail)
    return [finding.what for finding in findings if finding.broken]


@pytest.mark.parametrize("fault", gpu_faults.QUICK)
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning:torch")
def test_a_fault_breaks_its_check(fault: str) -> None:
    inject, expected = gpu_faults.QUICK[fault]
    assert broken_of(inject()) == expected


@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # imports of vLLM warn
@pytest.mark.parametrize("fault", gpu_faults.SLOW)
def test_a_fault_in_other_processes_breaks_its_check(fault: str) -> None:
    inject, expected = gpu_faults.SLOW[fault]
    assert broken_of(inject()) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_packed_rows_of_a_right_kernel_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "FUSED", flex.FusedAttention("eager"))  # traced, not compiled: quicker
    [finding] = attention.check_flex("cpu")
    assert not finding.broken, finding
    numbers = finding.numbers
    assert isinstance(numbers["logprobs"], float) and 0 < numbers["logprobs"] <= 1e-5
    assert sum(numbers["graphs"].values()) == 1  # type: ignore[union-attr]


def test_a_kernel_compiled_for_every_shape_is_broken() -> None:
    graphs = {"no grad, 4/2 heads of 64": 3, "grad, 4/2 heads of 64": 1}
    assert attention._graph_problems(graphs, "cuda") == [
        "flex_attention was compiled 3 times (no grad, 4/2 heads of 64)"
    ]
    assert "unfused" in attention._graph_problems({"no grad, x": 1}, "cuda")[0]


def test_an_engine_that_wakes_with_its_weights_passes() -> None:
    finding = asyncio.run(gpu_faults._turns(HfEngine))
    assert not finding.broken and "transformers engine" in finding.detail and finding.numbers["turns"] == 3


def test_with_one_gpu_ranks_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [finding] = ranks.check_ranks("cuda")
    assert finding.state == "skipped" and "one GPU" in finding.detail


def test_a_sleeping_engine_that_keeps_gpu_memory_is_broken() -> None:
    kept = {"problems": ["asleep it lets go of only 0.1 GB of GPU memory"], "numbers": {"freed GB": 0.1}}
    freed = {"problems": [], "numbers": {"freed GB": 2.1}}
    assert engines.sleep_finding(kept, "cuda").broken
    assert "2.1 GB of GPU memory free" in engines.sleep_finding(freed, "cuda").detail


def test_gpu_memory_that_does_not_come_back_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_free_bytes", lambda device: 1 << 30)
    with DoctorChild("tests.preflight.child_work:waiting") as owner:
        assert owner.receive(60)
        for pid in descendants(owner.pid):
            os.kill(pid, signal.SIGKILL)
        finding = engines._orphans(owner, "cuda", free=4 << 30)
    assert finding.broken and "3.2 GB of GPU memory" in finding.detail


def test_copies_are_measured_and_a_publish_is_estimated() -> None:
    speeds = copies.copy_speeds("cpu", 16 << 20)
    assert speeds.keys() == copies.FLOORS.keys() == copies.FIXES.keys() and min(speeds.values()) > 0


@pytest.mark.parametrize(
    ("spans", "right"),
    [
        ([(1, 0, 2), (2, 2, 4)], True),
        ([(2, 0, 4)], True),
        ([(1, 0, 2), (2, 3, 4)], False),
        ([(1, 0, 3)], False),
        ([(2, 0, 2), (1, 2, 4)], False),
        ([(0, 0, 4)], False),
    ],
)
def test_version_labels_must_cover_the_tokens_and_name_loaded_versions(
    spans: list[tuple[int, int, int]], right: bool
) -> None:
    one = object.__new__(Completion)  # an engine of another release could return what `Completion` would refuse
    object.__setattr__(one, "token_ids", [5, 6, 7, 8])
    object.__setattr__(one, "versions", tuple(_span(*span) for span in spans))
    assert (span_problems([one], {1, 2}) == []) is right


def _span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version, start, end)


STEP: dict[str, Json] = {"kind": "step", "metrics": {"reward_mean": 0.5}, "lags": [0, 0]}
STEPS: list[dict[str, Json]] = [{"kind": "worker ready"}, STEP, STEP, STEP]


@pytest.mark.parametrize(
    ("events", "code", "shown"),
    [
        (STEPS[:3], 0, "rewards of 3 steps"),
        (STEPS[1:], 0, "passed its probe"),
        ([*STEPS, {"kind": "worker recovered", "why": "version 2 failed its probe"}], 0, "version 2 failed its probe"),
        ([*STEPS[:3], STEP | {"lags": [0, 1]}], 0, "an earlier version"),
        (STEPS, 1, "exit code 1"),
        (STEPS, None, "did not end"),
    ],
)
def test_a_run_is_judged_by_its_own_record(events: list[dict[str, Json]], code: int | None, shown: str) -> None:
    assert not judge_training(STEPS, 0, "", "hf").broken
    finding = judge_training(events, code, "the output", "hf")
    assert finding.broken and shown in finding.detail and finding.log == "the output"


def test_a_child_reports_line_by_line_and_its_error_by_name() -> None:
    with DoctorChild("tests.preflight.child_work:counting_down", start=1) as child:
        assert child.receive(60) == {"number": 1, "inverse": 1.0}
        with pytest.raises(ChildFailed, match="ZeroDivisionError"):
            child.receive(60)
        assert "counting_down" in child.log()


def test_a_child_that_hangs_passes_its_deadline_and_is_killed_with_its_descendants() -> None:
    with DoctorChild("tests.preflight.child_work:waiting") as child:
        assert child.receive(60) == {"ready": True}
        with pytest.raises(DeadlinePassed, match="waiting"):
            child.receive(0.3)
        family = [child.pid, *descendants(child.pid)]
        assert len(family) == 2 and child.log() == "still here"
    assert not any(is_running(pid) for pid in family)


def failing(device: str) -> Iterator[GpuFinding]:
    yield passed("first", "fine")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_of_a_check_is_a_finding() -> None:
    first, second = timed("flex", failing, "cpu")
    assert not first.broken and second.broken and "illegal memory access" in second.detail and second.fix


class FakeChild:
    """Runs the units in this process, one message at a time; some units kill it."""

    started: list[list[str]]
    scripts: dict[str, list[GpuFinding]]

    def __init__(self, target: str, *, device: str, units: list[str]) -> None:
        self.started.append(units)
        self._messages = self._play(units)

    def __enter__(self) -> "FakeChild":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _play(self, units: list[str]) -> Iterator[dict[str, Any]]:
        yield {"machine": {"packages": {}}}
        for unit in units:
            if unit not in self.scripts:
                raise ChildFailed("the process was ended by SIGSEGV")
            for finding in self.scripts[unit]:
                yield {"finding": finding.to_json()}
            yield {"done": unit}

    def receive(self, within: float) -> dict[str, Any] | None:
        return next(self._messages, None)

    def log(self) -> str:
        return f"Traceback in {Path.home()}/secret"


def test_after_a_broken_or_crashed_check_the_others_run_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeChild.started = []
    FakeChild.scripts = {
        "copies": [passed("copies", "fast")],
        "ranks": [broken("ranks", "differ", "a fix")],
        "engine": [passed("engine tied", "right"), skipped("sleep and wake", "no")],
        "split engine": [passed("engine untied", "right")],
        "training": [passed("training", "3 steps")],
    }
    monkeypatch.setattr(session, "DoctorChild", FakeChild)
    doctor = DoctorSession("cpu")
    assert [one.what for one in doctor.run() if one.broken] == ["flex", "ranks"]
    assert [units[0] for units in FakeChild.started] == ["copies", "ranks", "engine"]
    report = doctor.report()
    assert report["broken"] == 2 and report["skipped"] == 1 and report["passed"] is False
    text = json.dumps(report)
    assert "SIGSEGV" in text and "Traceback in ~/secret" in text and str(Path.home()) not in text
    read = [GpuFinding.from_json(one) for one in report["checks"]]  # type: ignore[union-attr, arg-type]
    assert [str(one) for one in read] == [str(one) for one in doctor.findings]


def test_the_process_of_the_checks_says_what_machine_it_is() -> None:
    [first] = run_units("cpu", [])
    machine = first["machine"]
    assert isinstance(machine, dict) and machine["gpus"] == [] and machine["device"] == "cpu"
    assert "torch" in machine["packages"]  # type: ignore[operator]


def test_without_a_gpu_the_doctor_suggests_the_cpu() -> None:
    result = run(app, ["doctor", "--gpu"])
    assert result.exit_code == 2 and "offbeat doctor --gpu --device cpu" in result.output
    assert run(app, ["doctor", "--device", "cpu"]).exit_code == 2


def scripted(monkeypatch: pytest.MonkeyPatch, findings: list[GpuFinding], machine: dict[str, Json]) -> list[str]:
    """Let every session find this; return the devices that were checked."""
    checked: list[str] = []

    def play(self: DoctorSession) -> Iterator[GpuFinding]:
        checked.append(self.device)
        self.machine = machine
        self.findings += findings
        self._left.clear()
        yield from findings

    monkeypatch.setattr(DoctorSession, "run", play)
    return checked


@pytest.mark.parametrize("right", [True, False])
def test_the_command_prints_findings_writes_the_report_and_fails_if_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = passed("flex", "same") if right else broken("flex", "off by 1", "update torch")
    scripted(monkeypatch, [found], {"packages": {}})
    result = run(app, ["doctor", "--gpu", "--device", "cpu", "--json", str(tmp_path / "gpu.json")])
    assert result.exit_code == (0 if right else 1)
    assert ("fix: update torch" in result.output) is not right
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["passed"] is right and report["checks"][0]["what"] == "flex"


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Json]:
    machine: dict[str, Json] = {"gpus": [{"name": "A10"}], "driver": "570.1", "packages": {"torch": "2.13.0"}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OFFBEAT_SKIP_DOCTOR", raising=False)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(1, 1, 24.0)))
    monkeypatch.setattr(once, "describe_machine", lambda device: machine)
    return machine


def test_the_first_run_on_a_gpu_checks_it_once(monkeypatch: pytest.MonkeyPatch, gpu_machine: dict[str, Json]) -> None:
    checked, said = scripted(monkeypatch, [passed("flex", "same")], gpu_machine), list[str]()
    once.require_checked_gpu(said.append)
    once.require_checked_gpu(said.append)
    assert checked == ["cuda"] and len(said) == 2 and "first run on this GPU" in said[0]
    gpu_machine["driver"] = "571.0"
    once.require_checked_gpu(said.append)
    assert checked == ["cuda", "cuda"]


def test_a_broken_gpu_stops_every_run_until_it_is_fixed_or_the_check_is_skipped(
    monkeypatch: pytest.MonkeyPatch, gpu_machine: dict[str, Json], tmp_path: Path
) -> None:
    checked = scripted(monkeypatch, [broken("ranks", "NCCL hangs", "NCCL_P2P_DISABLE=1")], gpu_machine)
    for _ in range(2):
        with pytest.raises(RunError, match=r"(?s)NCCL hangs.*NCCL_P2P_DISABLE=1.*OFFBEAT_SKIP_DOCTOR=1"):
            once.require_checked_gpu(lambda line: None)
    assert len(checked) == 2 and [file.suffix for file in (tmp_path / "offbeat").iterdir()] == [".json"]
    monkeypatch.setenv("OFFBEAT_SKIP_DOCTOR", "1")
    once.require_checked_gpu(lambda line: None)
    assert len(checked) == 2


def test_a_machine_without_a_gpu_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = scripted(monkeypatch, [], {"packages": {}})
    once.require_checked_gpu(lambda line: None)
    assert checked == []


def test_training_asks_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, gpu_machine: dict[str, Json], tmp_path: Path
) -> None:
    scripted(monkeypatch, [broken("flex", "off by 1", "update torch")], gpu_machine)
    monkeypatch.setattr(api, "checked", lambda source, settings, **how: api.load_config())
    with pytest.raises(RunError, match="off by 1"):
        api.train(out=tmp_path / "run")


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("unit", UNITS)
def test_every_check_passes_on_cpu(unit: str) -> None:
    doctor = DoctorSession("cpu", [unit])
    findings = list(doctor.run())
    assert findings and all(one.state == "ok" for one in findings), [str(one) for one in findings]
