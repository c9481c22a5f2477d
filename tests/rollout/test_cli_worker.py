"""`offbeat worker`: a process that knows a run only by its directory."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.experience.log import ExperienceLog
from offbeat.rollout.hf import HfEngine
from offbeat.run.directory import RunDirectory
from offbeat.weights.probe import Probe
from offbeat.weights.publisher import WeightLog
from tests.fixtures.tiny_model import save_model

SEQUENCES = ((5, 6, 7, 8, 9, 10, 11, 12), (20, 4, 33))
run = CliRunner(env={"COLUMNS": "220"}).invoke


def publish(place: Path, version: int, model: LlamaForCausalLM, *, lie: bool = False) -> None:
    truth = asyncio.run(HfEngine(model).logprobs(SEQUENCES))
    probe = Probe(SEQUENCES, [one - 1 for one in truth] if lie else truth)
    with WeightLog.open(place / "weights") as log:
        log.publish(version, model.state_dict().items(), probe)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run that has published its first version."""
    save_model(tmp_path / "model")
    settings = {
        "model": {"path": str(tmp_path / "model"), "compute": "float32", "serve": "float32"},
        "task": {"name": "arithmetic"},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 6},
    }
    RunDirectory(tmp_path).create(parse(settings))
    publish(tmp_path, 0, LlamaForCausalLM.from_pretrained(tmp_path / "model"))
    return tmp_path


def moved(place: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(place / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


def arguments(place: Path, *more: str) -> list[str]:
    return ["worker", str(place), *more]


def test_a_worker_joins_a_run_and_writes_groups_of_its_newest_version(place: Path) -> None:
    publish(place, 4, moved(place))
    result = run(app, arguments(place, "--groups", "6", "--set", "workers.groups_at_once=3", "--name", "guest"))
    assert result.exit_code == 0, result.output
    assert "serving version 4: passed" in result.output
    with ExperienceLog.open(place / "experience") as log:
        groups = list(log.groups())
        assert len(groups) >= 6 and {group.oldest_version for group in groups} == {4}
        assert all(group.scored and group.prompt.columns["prompt"] for group in groups)


def test_a_version_that_is_not_served_ends_the_worker_with_a_sentence(place: Path) -> None:
    publish(place, 1, moved(place), lie=True)
    result = run(app, arguments(place, "--groups", "2"))
    assert result.exit_code == 1
    assert "does not serve version 1, even after a reload from an anchor" in result.output


@pytest.mark.engine
def test_a_worker_paces_itself_by_the_versions_it_sees_and_an_interrupt_ends_it_cleanly(place: Path) -> None:
    asked = arguments(place, "--per-version", "3", "--name", "guest")
    process = subprocess.Popen(
        [sys.executable, "-c", "from offbeat.cli.main import main; main()", *asked],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process, ExperienceLog.open(place / "experience") as log:
        for version in (0, 2):
            if version:
                publish(place, version, moved(place))
            until = time.monotonic() + 90
            while sum(g.oldest_version == version for g in log.groups()) < 3 and time.monotonic() < until:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
        versions = sorted(g.oldest_version for g in log.groups())
        log.ledger().check()
    assert process.returncode == 0, said
    assert versions == [0, 0, 0, 2, 2, 2]
    assert "2 versions loaded" in said
