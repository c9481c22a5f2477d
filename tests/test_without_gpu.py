"""PyPI's torch for Linux is a CUDA build: on a machine without a GPU it must use the CPU."""

from pathlib import Path

import pytest
import torch

from offbeat.rollout.hf import HfEngine
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.loading import load_policy_model
from tests.fixtures.tiny_model import save_model


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model directory; torch answers as its CUDA build does without a GPU."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    save_model(tmp_path)
    return tmp_path


def test_the_engine_runs_on_the_cpu(directory: Path) -> None:
    assert HfEngine.start(directory).model.device.type == "cpu"


def test_the_trainer_runs_on_the_cpu(directory: Path) -> None:
    assert load_policy_model(directory, Ranks(), compute=torch.float32).device.type == "cpu"
