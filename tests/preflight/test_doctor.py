"""`offbeat doctor`: every finding has a state, and every missing or broken part comes with a fix."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.errors import ProbeFailed
from offbeat.imports import install_command
from offbeat.preflight import doctor
from offbeat.preflight.doctor import CHECKS, Finding, FindingState, try_engine
from offbeat.rollout.engine import Engine
from offbeat.rollout.hf import HfEngine
from offbeat.sandbox import jail, open_sandbox

run = CliRunner(env={"COLUMNS": "200"}).invoke


def test_the_doctor_checks_versions_extras_engine_sandbox_and_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    result = run(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for what in (
        "offbeat: ",
        "extra train: ",
        "extra ray: ",
        "cores: ",
        "Ray authentication: ",
        "sandbox: ",
        "engine hf: ",
    ):
        assert what in result.output
    assert "serves what it loaded" in result.output and "0 broken" in result.output


def test_the_report_for_an_issue_has_versions_and_findings_and_no_paths_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("sandbox", FindingState.MISSING, f"{Path.home()}/bwrap is not executable", "chmod +x it")
    monkeypatch.setattr(doctor, "diagnose", lambda *, engine, only: iter([found]))
    result = run(app, ["doctor", "--json", str(tmp_path / "doctor.json")])
    assert result.exit_code == 0 and "report: " in result.output
    report = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    assert report["machine"]["versions"]["offbeat"] and report["machine"]["python"]
    assert report["checks"] == [
        {"what": "sandbox", "state": "missing", "detail": "~/bwrap is not executable", "fix": "chmod +x it"}
    ]


def test_the_doctor_runs_where_torch_is_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from offbeat.preflight.doctor import diagnose; "
        "print([finding.what for finding in diagnose()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "'sandbox']" in done.stdout, done.stderr


def test_every_problem_comes_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setattr(jail.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(doctor, "missing_modules", lambda modules: list(modules))
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch<2.14,>=2.13; extra == 'train'", "zz; extra == 'ray'"])
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    open_sandbox.cache_clear()
    problems = {one.what: one for one in doctor.diagnose(engine=True) if one.state is not FindingState.OK}
    assert all(one.fix for one in problems.values())
    fixes = {what: one.fix for what, one in problems.items()}
    assert fixes["extra ray"] == install_command("ray") and "OMP_WAIT_POLICY" in fixes["cores"]
    assert (
        fixes["Ray authentication"] == f"chmod 600 {token}"
        and problems["Ray authentication"].state is FindingState.BROKEN
    )
    assert fixes["sandbox"] == "install it with: apt-get install bubblewrap"
    assert install_command("vllm") in fixes["engine vllm"]


def test_a_version_outside_its_range_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy<1; extra == 'train'"])
    [finding] = doctor.check_extras()
    assert (
        finding.state is FindingState.BROKEN
        and "numpy<1 is needed" in finding.detail
        and finding.fix == install_command("train")
    )


def test_a_cluster_without_a_token_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    finding = doctor.check_ray_token()
    assert finding.state is FindingState.BROKEN and "export RAY_AUTH_MODE=token" in finding.fix


class StaleEngine(HfEngine):
    """Reports a load, but keeps its weights."""

    async def load(self, version: int, weights: object) -> None:
        self._version = version


def test_an_engine_that_keeps_its_weights_does_not_pass(tmp_path: Path) -> None:
    async def start(directory: Path) -> Engine:
        return StaleEngine.start(directory)

    with pytest.raises(ProbeFailed, match="after a load"):
        asyncio.run(try_engine(tmp_path, start))


def test_a_broken_finding_ends_the_command_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Finding("engine hf", FindingState.BROKEN, "RuntimeError: no", "pip install 'offbeat[train]'")
    monkeypatch.setattr(doctor, "diagnose", lambda engine, only: iter([broken]))
    result = run(app, ["doctor"])
    assert result.exit_code == 1 and "fix: pip install 'offbeat[train]'" in result.output


@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # imports of vLLM warn
def test_vllm_is_started_and_passes_its_probe() -> None:
    pytest.importorskip("vllm")
    finding = doctor.check_vllm_engine()
    assert finding.state is FindingState.OK, finding.detail


def test_one_check_can_be_run_alone() -> None:
    result = run(app, ["doctor", "--only", "sandbox", "--only", "cores"])
    lines = result.output.strip().split("\n")
    assert result.exit_code == 0 and not re.search(r"  (engine|extra) ", result.output)
    assert any(" cores: " in line for line in lines) and any(" sandbox: " in line for line in lines)


@pytest.mark.parametrize(
    ("words", "near"), [(["--only", "sandbx"], "sandbox"), (["--gpu", "--device", "cpu", "--only", "flexx"], "flex")]
)
def test_an_unknown_check_gets_a_suggestion(words: list[str], near: str) -> None:
    result = run(app, ["doctor", *words])
    assert result.exit_code == 2 and f"did you mean '{near}'?" in result.output


def test_every_check_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_modules", lambda modules: list(modules))
    for name in CHECKS:
        assert list(doctor.diagnose(only=[name])), name
