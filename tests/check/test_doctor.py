"""`offbeat doctor`: every finding says how it stands, and every lack how it is mended."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.check import doctor as diagnosis
from offbeat.check.doctor import Finding, FindingState, tried
from offbeat.cli.main import app
from offbeat.errors import ProbeFailed
from offbeat.rollout.engine import Engine
from offbeat.rollout.hf import HfEngine
from offbeat.sandbox import jail, open_sandbox

run = CliRunner(env={"COLUMNS": "200"}).invoke


def test_the_doctor_looks_at_versions_extras_engine_sandbox_and_ray(
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
    assert "serves what it loaded" in result.output and "0 ill" in result.output


def test_every_lack_comes_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setattr(jail.shutil, "which", lambda name, path: None)
    monkeypatch.setattr(diagnosis, "missing", lambda modules: list(modules))
    monkeypatch.setattr(
        diagnosis, "requires", lambda name: ["torch<2.14,>=2.13; extra == 'train'", "zz; extra == 'ray'"]
    )
    monkeypatch.setattr(diagnosis.os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    open_sandbox.cache_clear()
    lacks = {one.what: one for one in diagnosis.look(engine=True) if one.state is not FindingState.WELL}
    assert all(one.mend for one in lacks.values())
    cures = {what: one.mend for what, one in lacks.items()}
    assert cures["extra ray"] == "pip install 'offbeat[ray]'" and "OMP_WAIT_POLICY" in cures["cores"]
    assert cures["Ray authentication"] == f"chmod 600 {token}" and lacks["Ray authentication"].state is FindingState.ILL
    assert cures["sandbox"] == "install it with: apt-get install bubblewrap"
    assert "pip install 'offbeat[vllm]'" in cures["engine vllm"]


def test_a_version_outside_its_range_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "requires", lambda name: ["numpy<1; extra == 'train'"])
    [finding] = diagnosis.extras()
    assert (
        finding.state is FindingState.ILL and "numpy<1 is needed" in finding.says and "offbeat[train]" in finding.mend
    )


def test_a_cluster_without_a_token_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    finding = diagnosis.ray_token()
    assert finding.state is FindingState.ILL and "export RAY_AUTH_MODE=token" in finding.mend


class Stale(HfEngine):
    """Says that it loaded, and goes on with what it had."""

    async def load(self, version: int, weights: object) -> None:
        self._version = version


def test_an_engine_that_keeps_its_weights_does_not_pass(tmp_path: Path) -> None:
    async def start(directory: Path) -> Engine:
        return Stale.start(directory)

    with pytest.raises(ProbeFailed, match="after a load"):
        asyncio.run(tried(tmp_path, start))


def test_an_ill_finding_ends_the_command_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ill = Finding("engine hf", FindingState.ILL, "RuntimeError: no", "pip install 'offbeat[train]'")
    monkeypatch.setattr(diagnosis, "look", lambda engine: iter([ill]))
    result = run(app, ["doctor"])
    assert result.exit_code == 1 and "mend: pip install 'offbeat[train]'" in result.output


@pytest.mark.engine
@pytest.mark.filterwarnings("default")  # vLLM's own imports warn
def test_vllm_is_started_and_proven() -> None:
    pytest.importorskip("vllm")
    finding = diagnosis.vllm_engine()
    assert finding.state is FindingState.WELL, finding.says
