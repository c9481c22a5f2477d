"""The estimate from a model's files is close to what the trainer counts with the loaded model."""

from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.placement import hardware
from offbeat.preflight.forecast import ModelFiles, Speed, forecast
from offbeat.run.learner import make_trainer
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.worst_case import StepShape
from tests.fixtures.tiny_model import save_llama
from tests.trainer.live_bytes import activation_bytes, held_bytes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_estimated_memory_matches_what_the_trainer_counts(checkpointed: bool, tmp_path: Path) -> None:
    model = save_llama(tmp_path, tied=False)
    config = parse(
        {
            "model": {"path": str(tmp_path), "compute": "float32"},
            "sampling": {"max_tokens": 32},
            "engine": {"kind": "hf", "max_prompt_tokens": 128},
            "trainer": {"token_budget": 1024, "checkpoint_activations": checkpointed},
            "objective": {"kl_coefficient": 0.1},
        }
    )
    estimated = forecast(config, ModelFiles(tmp_path))
    trainer = make_trainer(config, Ranks())
    counted = held_bytes(trainer)
    assert estimated.parameters == sum(p.numel() for p in model.parameters())
    for term in ("master weights", "AdamW", "gradients", "reference policy"):
        assert estimated.trainer[term] == pytest.approx(counted[term], rel=1e-3)  # AdamW also stores its step counts
    if not checkpointed:
        kept = activation_bytes(trainer, StepShape(128, 32, config.group_size))
        assert estimated.trainer["activations"] == pytest.approx(kept, rel=0.5)


@pytest.fixture
def processor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the CPU have this instruction only."""
    (tmp_path / "cpuinfo").write_text(f"flags : {request.param}\n")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    return str(request.param)


@pytest.mark.parametrize("processor", ["avx2", "avx512_bf16"], indirect=True)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_estimated_memory_of_an_adapter_matches_what_the_trainer_counts(
    compute: str, processor: str, tmp_path: Path
) -> None:
    model = save_llama(tmp_path, tied=False)
    config = parse(
        {
            "model": {"path": str(tmp_path), "compute": compute},
            "adapter": {"rank": 8},
            "sampling": {"max_tokens": 32},
            "engine": {"max_prompt_tokens": 128},
            "trainer": {"token_budget": 1024},
            "objective": {"kl_coefficient": 0.1},
        }
    )
    estimated = forecast(config, ModelFiles(tmp_path))
    trainer = make_trainer(config, Ranks())
    counted = held_bytes(trainer)
    whole = sum(p.numel() for p in model.parameters())
    assert "reference policy" not in estimated.trainer and estimated.trainer["master weights"] < whole
    for term in {"master weights", "AdamW", "gradients", "frozen weights", "parameters"} & counted.keys():
        assert estimated.trainer[term] == pytest.approx(counted[term], rel=2e-3), term
    assert ("parameters" in counted) == (compute == "bfloat16")
    narrow = compute == "bfloat16" and processor == "avx512_bf16"
    assert counted["frozen weights"] == pytest.approx(whole * (2 if narrow else 4), rel=1e-3)
    kept = activation_bytes(trainer, StepShape(128, 32, config.group_size))
    assert estimated.trainer["activations"] == pytest.approx(kept, rel=0.5)
    assert estimated.copies["checkpoint"] == pytest.approx(3 * estimated.trainer["master weights"])
    assert estimated.copies["published weights"] == estimated.trainer["master weights"] // 2, "in bfloat16"


def test_copies_in_host_memory_are_a_checkpoint_and_the_published_weights(tmp_path: Path) -> None:
    count = sum(p.numel() for p in save_llama(tmp_path, tied=False).parameters())
    base = {"model": {"path": str(tmp_path), "serve": "float32"}, "workers": {"count": 2}}
    offline = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}
    here, on_ray, alone = (
        forecast(parse(base | change), ModelFiles(tmp_path)).copies
        for change in ({}, {"run": {"place": "ray"}}, offline)
    )
    assert on_ray == {"checkpoint": 12 * count, "published weights": 4 * count}
    assert here == on_ray | {"weights of workers": 2 * 4 * count}
    assert alone == {"checkpoint": 12 * count}


def test_a_step_grows_with_updates_and_recomputation_and_offline_generates_nothing(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=False)
    base = {"model": {"path": str(tmp_path)}}
    offline = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}
    looks_first = {"objective": {"preset": "m2po"}}
    one, four, recomputed, none, looking = (
        forecast(parse(base | change), ModelFiles(tmp_path))
        for change in (
            {},
            {"updates_per_batch": 4},
            {"trainer": {"checkpoint_activations": True}},
            offline,
            looks_first,
        )
    )
    assert four.training == 4 * one.training and recomputed.training == pytest.approx(one.training * 8 / 6)
    assert looking.training == pytest.approx(one.training * 8 / 6), "a gate over the whole batch has a pass of its own"
    assert none.generating == 0 < one.generating and one.seconds(Speed(1e9)) == (one.training + one.generating) / 1e9
