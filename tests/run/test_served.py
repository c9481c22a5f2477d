"""What a run evaluates and exports is the policy that it served, bit for bit, whatever its masters hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lab.parity.served import RUNS, bits, differing, evaluated, masters, published, trained, used
from offbeat.rollout.hf import HfEngine
from offbeat.trainer.export import logprobs_of
from tests.run.test_local import config, model, ran

pytestmark = pytest.mark.engine
TWO_RANKS = ("trainer.ranks=2", "run.place=ray")
KINDS = RUNS | {
    "bfloat16 on two ranks": TWO_RANKS,
    "bfloat16 on two ranks, served in float32": (*TWO_RANKS, "model.serve=float32"),
}
__all__ = ["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_eval_policy_and_a_float32_export_have_the_bits_of_the_version_served_last(kind: str, tmp_path: Path) -> None:
    run = trained(tmp_path, KINDS[kind])
    served, probe = published(run.directory)
    for place, policy in used(run, tmp_path).items():
        assert policy.dtype == torch.float32 and differing(bits(policy), bits(served)) == 0, place
        assert np.array_equal(logprobs_of(policy, probe), logprobs_of(served, probe)), place
    assert differing(masters(run.directory), bits(served)) > 10_000, "the masters are others"


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16, served in float32"])
def test_the_model_before_training_has_the_bits_of_version_0(kind: str, tmp_path: Path) -> None:
    run = trained(tmp_path, RUNS[kind])
    (first, probe), before = published(run.directory, 0), evaluated(run.directory)[1]
    assert differing(bits(before), bits(first)) == 0
    assert np.array_equal(logprobs_of(before, probe), logprobs_of(first, probe))


def test_a_run_without_workers_evaluates_what_it_would_serve_and_trains_on_with_its_masters(
    model: Path, tmp_path: Path
) -> None:
    _, donor = ran(config(model, steps=3), tmp_path / "donor")
    settings = {"run": {"mode": "offline", "experience": str(donor.experience)}, "sampler": {"mode": "offline"}}
    rounded: list[bool] = []
    generate = HfEngine.generate

    async def watched(engine: HfEngine, requests: list) -> list:
        rounded.append(all(torch.equal(one, one.bfloat16().float()) for one in engine.model.parameters()))
        return await generate(engine, requests)

    asked = config(model, steps=2, **settings)
    plain = asked.model_copy(update={"model": asked.model.model_copy(update={"serve": "bfloat16"})})
    evaluation = config(model, evaluation={"every": 1, "prompts": 4, "hold_out": 0.0}).evaluation
    watching = plain.model_copy(update={"evaluation": evaluation})
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(HfEngine, "generate", watched)
        _, found = ran(watching, tmp_path / "watching")
    assert rounded and all(rounded)
    _, expected = ran(plain, tmp_path / "plain")
    assert differing(masters(found), masters(expected)) == 0
