"""Steps at the real shapes of large models, on fake ranks with fake tensors."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lab.parity.fake_ranks import CASES, TOLERANCE, Case, walk_in_own_process
from offbeat.placement.memory import rank_memory
from offbeat.placement.shape import ModelShape
from tests import ROOT

pytestmark = pytest.mark.engine
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["qwen2.5-0.5b.8.8k", "qwen3-8b.8.8k", "qwen3-32b.32.8k"])
def test_a_step_needs_what_the_device_plan_says_and_publishes_every_tensor(name: str) -> None:
    case = BY_NAME[name]
    found = walk_in_own_process(case)
    estimate = rank_memory(case.config, ModelShape.from_config(case.model_config), shards=case.shards)
    assert estimate.peak == pytest.approx(found.peak, rel=TOLERANCE), (estimate.terms, found.by_kind)
    assert found.published == published_shapes(case)


def published_shapes(case: Case) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model_config))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def test_every_row_of_a_checkpoint_is_written_by_one_rank() -> None:
    code = "from lab.parity.fake_ranks import CASES, slices; print(*slices(CASES[1]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    exact, total = (int(number) for number in done.stdout.split()[-2:])
    assert exact == total > 200, done.stderr[-2000:]
