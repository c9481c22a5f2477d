"""All problems of a configuration are reported at once, each with a fix."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from offbeat.config import Config, examine, parse
from offbeat.config.parsing import load
from offbeat.errors import ConfigError
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import (
    KL,
    Advantage,
    CentredBand,
    CutOff,
    ExpWeight,
    GroupESS,
    Importance,
    KLEstimator,
    Need,
    OneSide,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    Truncate,
)


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(data)
    return error.value.problems


def test_defaults_are_valid_and_have_a_plan() -> None:
    assert parse({}).plan == "32 prompts × 8 = 256 completions a step → 1 update; sync every step: lag 0"
    assert parse({"updates_per_batch": 4, "sync": {"every": 2}}).plan.endswith(
        "→ 4 updates; sync every 2 steps: lag 0 to 1, in updates up to 7"
    )


def test_every_preset_is_published_as_it_is() -> None:
    for name, preset in PRESETS.items():
        assert parse({"objective": {"preset": name}}).objective.resolve() == preset.objective, name


def test_all_problems_are_reported_at_once_with_the_nearest_valid_name() -> None:
    found = problems(
        {"group_sise": 8, "prompts_per_step": 0, "sync": {"evry": 3}, "objective": {"aggregate": "token-men"}}
    )
    assert len(found) == 4
    assert "group_sise is not a setting; did you mean 'group_size'?" in found
    assert "sync.evry is not a setting; did you mean 'sync.every'?" in found
    assert any("prompts_per_step = 0" in p and "greater than or equal to 1" in p for p in found)
    assert "objective.aggregate = 'token-men' is not a choice; did you mean 'token-mean'?" in found


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    assert problems({"objective": {"preset": "rec-oneside-noi"}}) == [
        "objective.preset = 'rec-oneside-noi' is not a preset; did you mean 'rec-oneside-nois'?"
    ]


def test_truncated_sampling_is_refused_if_the_objective_needs_the_whole_distribution() -> None:
    (problem,) = problems({"objective": {"preset": "grpo"}, "sampling": {"top_p": 0.9}})
    assert "top_p = 0.9" in problem and "set top_p = 1.0" in problem
    parse({"objective": {"preset": "red-weight"}, "sampling": {"top_p": 0.9}})


def test_a_temperature_that_leaves_no_log_probs_is_refused() -> None:
    (problem,) = problems({"sampling": {"temperature": 1e-6}})
    assert "sampling.temperature = 1e-06: the log-prob of the sampled token would be 0" in problem
    assert problem.endswith("set at least 0.01")
    parse({"sampling": {"temperature": 0.01}})


def test_a_minimum_length_is_refused_if_it_cannot_be_reached_or_spoils_the_log_probs() -> None:
    (problem,) = problems({"objective": {"preset": "red-weight"}, "sampling": {"min_tokens": 9, "max_tokens": 8}})
    assert "sampling.min_tokens = 9 is more than sampling.max_tokens = 8; set at most 8" in problem
    (problem,) = problems({"objective": {"preset": "grpo"}, "sampling": {"min_tokens": 4}})
    assert "'grpo' needs the log-probs of the whole distribution" in problem and "ignore_eos = true" in problem
    parse({"objective": {"preset": "red-weight"}, "sampling": {"min_tokens": 8, "max_tokens": 8}})


def test_completions_that_ignore_the_end_need_no_minimum_and_are_never_masked() -> None:
    parse({"objective": {"preset": "grpo"}, "sampling": {"ignore_eos": True}})
    (problem,) = problems(
        {"objective": {"preset": "red-weight"}, "sampling": {"ignore_eos": True, "min_tokens": 4, "max_tokens": 8}}
    )
    assert "sampling.min_tokens = 4 has no effect with sampling.ignore_eos" in problem
    (problem,) = problems({"objective": {"preset": "grpo", "truncated": "mask"}, "sampling": {"ignore_eos": True}})
    assert "set objective.truncated = 'score'" in problem


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"preset": "reinforce", "clip": [0.2, 0.2]}, "has no gate"),
        ({"preset": "grpo-off-policy", "clip": [0.2, 0.3]}, "one width"),
        ({"preset": "grpo", "clip": [1.5, 0.2]}, "0 ≤ ε_lo ≤ 1"),
        ({"preset": "red-drop", "weight_cap": 2.0}, "no importance weight"),
        ({"preset": "m2po", "clip": [0.2, 0.2]}, "a gate without a clip, whose limit is objective.m2_limit"),
        ({"preset": "grpo", "outer_clip": [0.6, 2.0]}, "no ring"),
        ({"preset": "grpo", "m2_limit": 0.04}, "no gate on the second moment"),
        ({"preset": "grpo", "correction_cap": 2.0}, "no correction factor π_k/α"),
        ({"preset": "ess-gate", "reject_band": [0.5, 2.0]}, "no band of π_k/α"),
        ({"preset": "sequence-mask", "min_ess": 0.5}, "no gate on the effective sample size"),
        ({"preset": "red-weight-adaptive", "temperature": 1.0}, "chosen per batch, within objective.temperature_range"),
        ({"preset": "grpo", "temperature": 1.0}, "no exponential weight"),
        ({"preset": "red-weight", "temperature_range": [1.0, 2.0]}, "no temperature that is chosen per batch"),
        ({"preset": "grpo", "exponent_cap": 5.0}, "no exponential weight"),
        ({"preset": "grpo", "tau": 0.1}, "no square of the log-ratio"),
        ({"preset": "rec-ring", "outer_clip": [0.1, 2.0]}, "need 0.2 ≤ ε'_lo < 1 and ε'_hi ≥ 0.2"),
        ({"preset": "sequence-mask", "reject_band": [1.1, 2.0]}, "need 0 ≤ low ≤ 1 ≤ high"),
        ({"preset": "red-weight-adaptive", "temperature_range": [3.0, 2.0]}, "need 0 < lowest ≤ highest"),
        ({"preset": "reinforce", "epsilon": 0.1}, "'centred' advantages are not divided"),
        ({"preset": "dapo", "advantage": "shrunk"}, "set objective.zero_variance_mask = false"),
        ({"preset": "grpo", "prior_halflife": 20.0}, "set objective.advantage = 'shrunk'"),
        ({"preset": "grpo", "kl_estimator": "k3"}, "set objective.kl_coefficient above 0"),
    ],
)
def test_changes_that_conflict_with_the_preset_are_refused(objective: dict[str, Any], message: str) -> None:
    (problem,) = problems({"objective": objective})
    assert message in problem and problem.startswith("objective.")


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"preset": "grpo-off-policy", "clip": [0.1, 0.1]}, "the band never binds; set updates_per_batch above 1"),
        ({"preset": "tis", "clip": [0.1, 0.1]}, "the band never binds; set updates_per_batch above 1"),
        ({"preset": "tis", "weight_cap": 3.0}, "set objective.correction_cap, which caps π_k/α"),
        ({"preset": "decoupled-ppo", "weight_cap": 3.0}, "is 1; set objective.correction_cap"),
    ],
)
def test_what_one_update_a_batch_makes_idle_is_refused(objective: dict[str, Any], message: str) -> None:
    (problem,) = problems({"objective": objective})
    assert message in problem
    parse({"objective": objective, "updates_per_batch": 2})


def test_the_weight_cap_of_a_ratio_against_the_behavior_policy_is_accepted_with_one_update() -> None:
    parse({"objective": {"preset": "grpo-off-policy", "weight_cap": 3.0}})
    parse({"objective": {"preset": "gspo", "clip": [0.1, 0.1]}})


def test_a_reference_that_nothing_uses_is_refused() -> None:
    (problem,) = problems({"reference": {"refresh_every": 5}})
    assert "kl_coefficient" in problem
    parse({"reference": {"refresh_every": 5}, "objective": {"kl_coefficient": 0.01}})


def test_changes_reach_the_objective() -> None:
    changed = {
        "preset": "grpo",
        "clip": [0.6, 2.0],
        "weight_cap": 5.0,
        "kl_coefficient": 0.01,
        "zero_variance_mask": True,
    }
    objective = parse({"objective": changed}).objective.resolve()
    assert objective.gate == OneSide(0.6, 2.0) and objective.weight == Importance(5.0)
    assert objective.regularizers == (KL(0.01, weighted=True),) and objective.zero_variance_mask
    assert Need.REFERENCE in objective.needs
    banded = {"preset": "grpo-off-policy", "clip": [0.1, 0.1]}
    assert parse({"objective": banded, "updates_per_batch": 2}).objective.resolve().gate == CentredBand(0.1)


@pytest.mark.parametrize(
    ("changes", "axis", "expected"),
    [
        ({"preset": "rec-ring", "outer_clip": [0.5, 3.0]}, "gate", Ring(0.2, 0.2, 0.5, 3.0)),
        ({"preset": "m2po", "m2_limit": 0.1}, "gate", SecondMoment(0.1)),
        ({"preset": "tis", "correction_cap": 4.0}, "correction", Truncate(4.0)),
        ({"preset": "sequence-mask", "reject_band": [0.8, 1.5]}, "reject", Reject(0.8, 1.5)),
        ({"preset": "ess-gate", "min_ess": 0.7}, "reject", GroupESS(0.7)),
        ({"preset": "red-weight", "temperature": 2.0, "exponent_cap": 3.0}, "exp_weight", ExpWeight(2.0, 3.0)),
        (
            {"preset": "red-weight-adaptive", "temperature_range": [1.0, 9.0]},
            "exp_weight",
            ExpWeight(adaptive=True, lowest=1.0, highest=9.0),
        ),
        ({"preset": "opmd", "tau": 0.5}, "regularizers", (SquaredLogRatio(0.5),)),
        ({"preset": "asymre", "baseline_shift": 0.3}, "baseline_shift", 0.3),
        ({"preset": "grpo", "epsilon": 1e-6}, "epsilon", 1e-6),
        ({"preset": "grpo", "truncated": "mask"}, "truncated", CutOff.MASK),
        ({"preset": "grpo", "advantage": "shrunk", "prior_halflife": 9.0}, "advantage", Advantage.SHRUNK),
        (
            {"preset": "reinforce", "kl_coefficient": 0.1, "kl_estimator": "k2"},
            "regularizers",
            (KL(0.1, KLEstimator.K2),),
        ),
    ],
)
def test_every_constant_of_a_preset_can_be_changed(changes: dict[str, Any], axis: str, expected: object) -> None:
    assert getattr(parse({"objective": changes}).objective.resolve(), axis) == expected


def test_a_file_is_read_and_a_broken_one_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("group_size = 4\n[sync]\nevery = 3\n")
    assert load(file).group_size == 4
    file.write_text("group_size = \n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file)
    with pytest.raises(ConfigError, match="is not a file; `offbeat init`"):
        load(tmp_path / "missing.toml")


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [f.annotation for f in model.model_fields.values()]
    return [model] + [s for n in nested if isinstance(n, type) and issubclass(n, BaseModel) for s in sections(n)]


def test_every_setting_has_a_docstring() -> None:
    for section in sections(Config):
        assert section.__doc__
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or is_section, f"{section.__name__}.{name} has no docstring under it"


@pytest.mark.parametrize(
    "name",
    [
        *("seed", "dtype", "quantization", "kv_cache_dtype", "logprobs_mode", "generation_config", "load_format"),
        *("trust_remote_code", "speculative_config", "model", "tokenizer", "revision", "tensor_parallel_size"),
        *("enable_prefix_caching", "worker_extension_cls", "hf_overrides", "override_generation_config"),
        *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "logits_processors", "reasoning_parser"),
        *("enable_lora", "lora_dtype", "worker_cls", "scheduler_cls", "pipeline_parallel_size", "watermark_config"),
        *("distributed_executor_backend", "additional_config", "cpu_offload_gb", "kv_sharing_fast_prefill"),
    ],
)
def test_engine_arguments_that_change_what_is_sampled_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.extra = .* sets arguments that it may not: {name} "):
        parse({"engine": {"extra": {name: 1, "max_num_batched_tokens": 8192}}})


def test_engine_arguments_about_speed_and_memory_pass() -> None:
    extra = {"max_num_batched_tokens": 8192, "block_size": 64, "compilation_config": {"level": 3}, "watermark": 0.01}
    assert parse({"engine": {"extra": extra}}).engine.extra == extra


def test_a_faulty_number_of_steps_hides_only_problems_that_name_its_default() -> None:
    lag = "sync.every = 50 gives lag up to 49, and a group may be 4 steps old"
    warm_up = "optimizer.warmup_steps = 300: the run ends before the warm-up, at steps = 200; set at most 200"
    examined = examine({"steps": -1}).also([lag, warm_up])
    assert len(examined.problems) == 2 and examined.problems[1] == lag
