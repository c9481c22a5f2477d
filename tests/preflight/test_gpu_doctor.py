"""`offbeat doctor --gpu`: every part passes on a right machine, and fails when its fault is injected."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.placement.hardware import Hardware
from offbeat.preflight import gpu_run as run
from offbeat.preflight import gpu_session as session
from offbeat.preflight.doctor import Finding, FindingState
from offbeat.preflight.gpu_session import PARTS, DoctorSession, examine
from offbeat.rollout.engine import Engine, Weights
from offbeat.rollout.hf import HfEngine
from offbeat.trainer import flex
from offbeat.types import Json
from tests.rollout.family import eventually_gone

command = CliRunner(env={"COLUMNS": "200"}).invoke
OK, BROKEN = FindingState.OK, FindingState.BROKEN


def test_the_parts_end_within_five_minutes() -> None:
    assert sum(limit for _, limit in PARTS.values()) <= 300


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is traced but not compiled, which is quicker."""
    monkeypatch.setattr(flex, "FUSED", flex.FusedAttention("eager"))


@pytest.mark.engine
@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_packed_rows_of_a_right_kernel_pass() -> None:
    finding = run.check_flex("cpu")
    assert finding.state is OK, finding
    numbers = finding.numbers
    assert isinstance(numbers["logprobs"], float) and 0 < numbers["logprobs"] <= 1e-5
    assert sum(numbers["graphs"].values()) == 1  # type: ignore[union-attr]


@pytest.mark.engine
@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_mask_that_hides_the_prompt_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flex.find_blocks

    def wrong(segment_ids_L: flex.Indices, position_ids_L: flex.Indices) -> tuple[flex.VisibleKeys, flex.BlockLists]:
        keys, lists = right(segment_ids_L, position_ids_L)
        return keys._replace(prompt_end_L=np.zeros_like(keys.prompt_end_L)), lists

    monkeypatch.setattr(flex, "find_blocks", wrong)
    finding = run.check_flex("cpu")
    assert finding.state is BROKEN and finding.fix and "packed rows are off" in finding.detail


class UnfusedKernel:
    """flex_attention that is not compiled: right, with all scores in memory."""

    def __init__(self) -> None:
        self.graphs: Counter[str] = Counter()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_kernel_that_is_not_fused_or_compiled_for_every_shape_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "FUSED", UnfusedKernel())
    assert "unfused" in run.check_flex("cpu").detail
    graphs = {"no grad, 4/2 heads of 64": 3, "grad, 4/2 heads of 64": 1}
    assert run.graph_problems(graphs, "cuda") == ["flex_attention was compiled 3 times (no grad, 4/2 heads of 64)"]
    assert "unfused" in run.graph_problems({"no grad, x": 1}, "cuda")[0]


def test_copies_are_measured_and_a_publish_is_estimated() -> None:
    speeds = session.copy_speeds("cpu", 16 << 20)
    assert speeds.keys() == session.FLOORS.keys() and min(speeds.values()) > 0


@pytest.mark.engine
def test_a_slow_disk_and_a_slow_link_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right_write, right_copy = session.write, session.copy

    def slow_write(file: IO[bytes], content: np.ndarray, *, durable: bool) -> None:
        time.sleep(2.0 if durable else 0.0)
        right_write(file, content, durable=durable)

    def slow_copy(to: Tensor, source: Tensor) -> None:
        time.sleep(0.3)
        right_copy(to, source)

    with monkeypatch.context() as patch:
        patch.setattr(session, "write", slow_write)
        disk = session.check_machine("cpu")
    monkeypatch.setattr(session, "copy", slow_copy)
    link = session.check_machine("cpu")
    assert disk.state is link.state is BROKEN
    assert "disk write at" in disk.detail and "local disk" in disk.fix
    assert "host to device at" in link.detail and "PCIe" in link.fix


class ForgetfulEngine(HfEngine):
    """Wakes with weights that are not those it fell asleep with."""

    async def wake(self) -> None:
        await super().wake()
        for parameter in self.model.parameters():
            parameter.data += 0.01


class UnchangedEngine(HfEngine):
    """Reports a load, but keeps its weights."""

    async def load(self, version: int, weights: Weights) -> None:
        self._version = version


@pytest.mark.parametrize(
    ("kind", "shown"),
    [(HfEngine, ""), (ForgetfulEngine, "it serves other weights"), (UnchangedEngine, "was loaded but is not served")],
)
def test_an_engine_must_wake_with_its_weights_and_serve_what_it_loads(kind: type[HfEngine], shown: str) -> None:
    async def start() -> Engine:
        return kind(run.doctor_llama(tied=True))

    finding = asyncio.run(run.turns_of(start, "cpu"))
    assert finding.state is (BROKEN if shown else OK) and shown in finding.detail
    assert "transformers engine" in finding.detail and finding.numbers["turns"] == 3


def test_with_several_gpus_sleep_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    finding = run.check_sleep("cuda")
    assert finding.state == "skipped" and "several GPUs" in finding.detail


@pytest.mark.engine  # a run of seconds
@pytest.mark.parametrize("right", [True, False])
def test_a_run_whose_engine_keeps_its_weights_is_broken(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    monkeypatch.setattr(run, "missing_modules", lambda modules: modules)
    if not right:
        monkeypatch.setattr(HfEngine, "load", UnchangedEngine.load)
    finding = examine("training", run.check_training, "cpu")
    assert finding.state is (OK if right else BROKEN), finding
    assert right or "does not serve version 1" in finding.detail


STEP: dict[str, Json] = {"kind": "step", "metrics": {"reward_mean": 0.5}, "lags": [0, 0]}
EVENTS = [STEP, STEP, STEP]


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        (EVENTS[:-1], "rewards of 3 steps"),
        ([*EVENTS[:-1], STEP | {"lags": []}], "an earlier version"),
        ([*EVENTS, {"kind": "worker recovered", "why": "version 2 failed its probe"}], "version 2 failed its probe"),
        ([*EVENTS[:-1], STEP | {"lags": [0, 1]}], "an earlier version"),
    ],
)
def test_a_run_is_judged_by_its_own_record(events: list[dict[str, Json]], shown: str) -> None:
    assert run.judge_training(EVENTS, "hf").state is OK
    finding = run.judge_training(events, "hf")
    assert finding.state is BROKEN and shown in finding.detail


def failing(device: str) -> Finding:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_of_a_check_is_a_finding() -> None:
    finding = examine("flex", failing, "cpu")
    assert finding.state is BROKEN and "illegal memory access" in finding.detail and finding.fix


@pytest.mark.engine
def test_a_part_that_crashes_or_hangs_is_broken_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parent / "doctor_parts.py"
    limits = {"crashing": 60.0, "hanging": 10.0, "fine": 60.0}
    parts = {name: (f"{file}:{name}", limit) for name, limit in limits.items()}
    monkeypatch.setattr(session, "PARTS", parts)
    doctor = DoctorSession("cpu", list(parts))
    crashed, hung, passed = doctor.run()
    assert crashed.state is hung.state is BROKEN and passed.state is OK and passed.numbers == {"speed": 2}
    assert "exit code 9" in crashed.detail and "did not end within 10 s" in hung.detail
    eventually_gone([int((tmp_path / "child").read_text())])
    report = doctor.report()
    assert report["broken"] == 2 and report["passed"] is False
    text = json.dumps(report)
    assert "~/secret" in text and str(Path.home()) not in text
    packages = report["machine"]["packages"]  # type: ignore[index, call-overload]
    assert "torch" in packages


def test_without_a_gpu_the_doctor_suggests_the_cpu() -> None:
    result = command(app, ["doctor", "--gpu"])
    assert result.exit_code == 2 and "offbeat doctor --gpu --device cpu" in result.output
    assert command(app, ["doctor", "--device", "cpu"]).exit_code == 2
    assert "did you mean 'flex'" in command(app, ["doctor", "--gpu", "--device", "cpu", "--only", "flexx"]).output


@pytest.mark.parametrize("right", [True, False])
def test_the_command_prints_findings_writes_the_report_and_fails_if_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool
) -> None:
    found = Finding("flex", OK, "same") if right else Finding("flex", BROKEN, "off by 1", "update torch")

    def play(self: DoctorSession) -> Iterator[Finding]:
        self.findings.append(found)
        yield found

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(DoctorSession, "run", play)
    arguments = ["doctor", "--gpu", "--device", "cpu", "--only", "flex", "--json", str(tmp_path / "gpu.json")]
    result = command(app, arguments)
    assert result.exit_code == (0 if right else 1)
    assert ("fix: update torch" in result.output) is not right
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["passed"] is right and report["checks"][0]["what"] == "flex"


def test_a_run_says_in_one_line_that_its_gpus_were_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert session.unchecked_line() == ""  # no GPU here
    known: dict[str, Any] = {"gpus": [{"name": "A10"}], "driver": "570.1", "packages": {"torch": "2.13.0"}}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(1, 1, 24.0)))
    monkeypatch.setattr(session, "describe_machine", lambda device: known)
    assert "have not been checked; `offbeat doctor --gpu`" in session.unchecked_line()
    doctor = DoctorSession("cuda", ["flex"])
    doctor.findings = [Finding("flex", OK, "same")]
    doctor.keep()
    assert session.unchecked_line() == ""
    known["driver"] = "571.0"
    assert "have not been checked" in session.unchecked_line()
    doctor.findings = [Finding("flex", BROKEN, "off by 1", "update torch")]
    doctor.keep()
    assert session.unchecked_line() == "the last `offbeat doctor --gpu` found something broken on this machine: flex"


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("part", PARTS)
def test_every_part_passes_on_cpu(part: str) -> None:
    doctor = DoctorSession("cpu", [part])
    [finding] = doctor.run()
    assert finding.state is OK, finding
