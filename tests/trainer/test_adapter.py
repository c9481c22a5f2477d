"""An adapter is trained as peft and autograd would train it; its base stays as it is; its checkpoint is small."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive import Case, naive_loss
from naive_trainer import _logprobs
from safetensors.torch import load_file

from offbeat.errors import AdapterMismatch, CheckpointMismatch, UnsupportedModel
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL
from offbeat.seeds import derive
from offbeat.trainer.adapter import attach, load_adapter, stored_name
from offbeat.trainer.batch import Batch, assemble_batch
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.checkpoint_files import trainer_tensors
from offbeat.trainer.forward import PolicyModel, sequence_logprobs
from offbeat.trainer.fsdp import Ranks, as_served, named_tensors, serving_state
from offbeat.trainer.loading import load_policy_model
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Group, Json
from tests.fixtures.adapters import (
    SPEC,
    GradientRecorder,
    adapter_gradients,
    adapter_steps,
    random_adapter,
    relative,
    with_peft,
)
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import digest_of, small_batch, small_model, small_trainer

CONFIG: Json = {"seed": 7}


def peft_gradients(model: torch.nn.Module, groups: list[Group], preset: str) -> dict[str, torch.Tensor]:
    """One completion at a time through plain peft, full logits, the published formula, autograd."""
    policy = [[_logprobs(model, group, i) for i in range(len(group.completions))] for group in groups]
    case = Case(
        rewards=[[c.score.reward for c in group.completions] for group in groups],
        policy=policy,
        behavior=[[torch.from_numpy(c.behavior_logprobs.copy()) for c in group.completions] for group in groups],
        proximal=[[logprobs.detach() for logprobs in row] for row in policy],
        seeds=[derive(0, "red-drop", group.id) for group in groups],
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(naive_loss(preset, case), list(trained.values()))
    return {stored_name(n.removeprefix("base_model.model.")): g for n, g in zip(trained, found, strict=True)}


def adapted(**changes: object) -> PolicyModel:
    policy_model = PolicyModel(small_model(), adapter=replace(SPEC, **changes))  # type: ignore[arg-type]
    load_adapter(policy_model.model, random_adapter(small_model()))
    return policy_model


@pytest.mark.parametrize("preset", ["grpo", "rec-oneside-nois"])
@pytest.mark.parametrize(("tied", "recomputed"), [(True, False), (False, False), (True, True)])
def test_gradients_equal_those_of_plain_peft_and_autograd(
    tmp_path: Path, preset: str, tied: bool, recomputed: bool
) -> None:
    state, groups = random_adapter(small_model(tied=tied)), small_batch(0)
    policy_model = PolicyModel(small_model(tied=tied), adapter=SPEC, checkpoint_activations=recomputed)
    load_adapter(policy_model.model, state)
    optimizer = GradientRecorder(policy_model, OptimizerSettings(Schedule(1e-3)))
    trainer = Trainer(policy_model, optimizer, StepSettings(PRESETS[preset].objective, token_budget=48))
    assert trainer.check.shared_prefix
    assert isinstance(trainer.train(groups), Trained)
    found = {stored_name(name.removeprefix("model.")): gradient for name, gradient in optimizer.seen.items()}
    assert relative(found, peft_gradients(with_peft(small_model(tied=tied), state, tmp_path), groups, preset)) <= 1e-6


@pytest.mark.engine
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_get_the_gradients_of_plain_peft(tmp_path: Path, size: int) -> None:
    small_model().save_pretrained(tmp_path / "model")
    out = tmp_path / "gradients.safetensors"
    run_ranks(adapter_gradients, size, (str(tmp_path / "model"), "grpo", str(out)))
    found = {stored_name(name.removeprefix("model.")): gradient for name, gradient in load_file(out).items()}
    peft = with_peft(small_model(), random_adapter(small_model()), tmp_path / "peft")
    assert relative(found, peft_gradients(peft, small_batch(0, groups=5), "grpo")) <= 1e-6


@pytest.mark.engine
def test_two_ranks_train_and_resume_an_adapter_like_one_process(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path / "model")

    def trained(ranks: int, place: str, steps: int) -> list[Json]:
        return run_ranks(adapter_steps, ranks, (str(tmp_path / "model"), str(tmp_path / place), steps))

    [alone], both = trained(1, "alone", 3), trained(2, "whole", 3)
    trained(2, "cut", 2)
    assert [one["digests"]["3"] for one in trained(2, "cut", 3)] == [one["digests"]["3"] for one in both]
    states = [{name: torch.tensor(values) for name, values in one["state"].items()} for one in (both[0], alone)]
    assert relative(*states) <= 1e-5 and both[1]["state"] == {}
    [again] = trained(1, "cut", 4)  # one process continues what two began
    assert again["digests"].keys() == {"4"}


def test_only_the_adapter_moves_and_only_it_has_masters_and_moments() -> None:
    model = small_model(dtype=torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    policy_model = PolicyModel(model, adapter=SPEC)
    load_adapter(policy_model.model, random_adapter(small_model()))
    trainer = Trainer(
        policy_model,
        MasterAdamW(policy_model, OptimizerSettings(Schedule(1e-2))),
        StepSettings(PRESETS["grpo"].objective),
    )
    start = {name: tensor.clone() for name, tensor in named_tensors(policy_model)}
    for step in range(3):
        trainer.train(small_batch(step))
    after = {name.replace(".base_layer.", "."): tensor for name, tensor in policy_model.model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(not torch.equal(tensor, start[name]) for name, tensor in named_tensors(policy_model))
    held = trainer_tensors(trainer)
    assert all("lora_" in name for name in held)
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}, "masters and moments"
    assert {tensor.dtype for _, tensor in named_tensors(policy_model)} == {torch.bfloat16}


def test_version_0_is_the_base_and_depends_on_the_seed_of_the_run_alone(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)

    def loaded(seed: int) -> PolicyModel:
        return load_policy_model(tmp_path, Ranks(), compute=torch.float32, adapter=SPEC, seed=seed)

    torch.manual_seed(1)
    one, generator = loaded(5), torch.get_rng_state()
    torch.manual_seed(2)
    again, other = loaded(5), loaded(6)
    torch.manual_seed(1)
    assert torch.equal(generator, torch.get_rng_state()), "nothing is drawn from the global generator"
    states = [dict(serving_state(policy_model, torch.float32)) for policy_model in (one, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for name, tensor in states[0].items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            limit = tensor.shape[1] ** -0.5
            assert 0.5 * limit < tensor.abs().max() <= limit and not torch.equal(tensor, states[2][name])
    sequences = [[3, 4, 5, 6], [7, 8, 9]]
    for ours, theirs in zip(
        sequence_logprobs(one, sequences), sequence_logprobs(small_model().eval(), sequences), strict=True
    ):
        assert (ours == theirs).all()


def test_the_reference_policy_is_the_base_without_a_second_model() -> None:
    objective = replace(PRESETS["grpo"].objective, regularizers=(KL(0.1),))
    policy_model, base = adapted(), PolicyModel(small_model())
    trainer = Trainer(policy_model, MasterAdamW(policy_model, OptimizerSettings()), StepSettings(objective))
    expected = Trainer(base, MasterAdamW(base, OptimizerSettings()), StepSettings(PRESETS["grpo"].objective))
    for ours, theirs in zip(
        trainer._make_micro_batches(some_batch()), expected._make_micro_batches(some_batch()), strict=True
    ):
        with torch.no_grad():
            wanted = theirs.pad(base(expected._model_inputs(theirs)).logprobs)
        assert ours.reference_NT is not None and torch.equal(ours.reference_NT, wanted)
    assert all(p.requires_grad == ("lora_" in n) for n, p in policy_model.named_parameters()), "and training goes on"
    assert isinstance(trainer.train(small_batch(0)), Trained)


def some_batch() -> Batch:
    return assemble_batch(small_batch(0), PRESETS["grpo"].objective, step=0, seed=0, context=None)


def test_a_second_model_as_reference_is_refused() -> None:
    objective = replace(PRESETS["grpo"].objective, regularizers=(KL(0.1),))
    policy_model = adapted()
    with pytest.raises(ValueError, match="reference policy is its base"):
        Trainer(policy_model, MasterAdamW(policy_model, OptimizerSettings()), StepSettings(objective), adapted())


def test_what_is_published_is_rounded_once_and_what_the_probe_computes_with() -> None:
    policy_model = adapted()
    exact = {name: tensor.clone() for name, tensor in named_tensors(policy_model)}
    published = dict(serving_state(policy_model, torch.bfloat16))
    assert all(name.startswith("base_model.model.model.layers.") for name in published)
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in published.items())
    with as_served(policy_model, torch.bfloat16):
        assert all(torch.equal(t, published[name].float()) for name, t in named_tensors(policy_model))
    assert all(torch.equal(tensor, exact[name]) for name, tensor in named_tensors(policy_model))


def test_a_restored_trainer_continues_with_the_same_bits_from_a_checkpoint_of_the_adapter(tmp_path: Path) -> None:
    trainer = small_trainer(adapter=SPEC)
    for step in range(2):
        trainer.train(small_batch(step))
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        checkpoints.save(trainer, {})
        trainer.train(small_batch(2))
        newest = checkpoints.newest()
    assert newest is not None
    assert all("lora_" in name for name, _ in newest.policy())
    again = small_trainer(adapter=SPEC)
    newest.restore(again)
    again.train(small_batch(2))
    assert digest_of(again) == digest_of(trainer)
    for other in (replace(SPEC, base="11" * 32), replace(SPEC, alpha=16.0)):
        with pytest.raises(CheckpointMismatch, match="of another adapter, or of one of another base: adapter"):
            newest.restore(small_trainer(adapter=other))
    with pytest.raises(CheckpointMismatch, match="another adapter"):
        newest.restore(small_trainer())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_projj"])
def test_a_target_that_is_no_linear_layer_of_the_body_is_refused(target: str) -> None:
    with pytest.raises(UnsupportedModel, match="has no linear layer"):
        attach(small_model(), replace(SPEC, targets=("q_proj", target)))


def test_an_adapter_with_a_missing_layer_or_another_rank_is_refused() -> None:
    model, state = small_model(), random_adapter(small_model())
    attach(model, SPEC)
    name = next(iter(state))
    with pytest.raises(AdapterMismatch, match="it is missing"):
        load_adapter(model, {key: tensor for key, tensor in state.items() if key != name})
    with pytest.raises(AdapterMismatch, match="but the model has"):
        load_adapter(model, state | {name: state[name][:1]})
