"""A step gives the results of a naive trainer, for any cut into micro-batches."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_trainer import naive_step
from small import (
    VOCABULARY,
    a_llama,
    a_trainer,
    close_to,
    equal_rewards,
    lagged,
    logprobs,
    moved,
    some_groups,
)
from transformers import GPT2Config, GPT2LMHeadModel

from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL, Advantage, Aggregate, Objective
from offbeat.trainer.batch import plan_micro_batches
from offbeat.trainer.forward import ModelCheck, PolicyModel
from offbeat.trainer.optimizer import OptimizerSettings, Schedule
from offbeat.trainer.trainer import Trained, Trainer
from offbeat.types import Group, StepContext

LENGTH_LIMIT = 9


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class TestAgainstTheNaiveTrainer:
    @pytest.mark.parametrize("name", sorted(PRESETS))
    @pytest.mark.parametrize("updates", [1, 3])
    def test_every_preset_makes_the_same_update(self, name: str, updates: int) -> None:
        groups, naive = lagged(seed=11, spread=0.004 if "mask" in name else 0.15), a_llama()
        start = torch.cat([p.detach().flatten() for p in naive.parameters()])
        trainer = a_trainer(
            PRESETS[name].objective,
            rate=1e-3,
            updates_per_batch=updates,
            length_limit=LENGTH_LIMIT,
            optimizer=OptimizerSettings(Schedule(1e-3), max_grad_norm=0.05),
        )
        found = moved(trainer, groups)
        naive_step(naive, groups, name, updates=updates, rate=1e-3, clip=0.05)
        expected = torch.cat([p.detach().flatten() for p in naive.parameters()]) - start
        # Adam divides by the gradient's own size, so where it is nearly 0 rounding decides. Hence one norm over all.
        assert relative(found, expected) < 1e-3

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_every_preset_has_the_same_gradient_norm(self, name: str) -> None:
        groups = lagged(seed=5, spread=0.004 if "mask" in name else 0.15)
        done = a_trainer(PRESETS[name].objective, length_limit=LENGTH_LIMIT).train(groups)
        assert isinstance(done, Trained)
        assert done.metrics["grad_norm"] == pytest.approx(
            naive_step(a_llama(), groups, name, updates=1, rate=0), rel=1e-5
        )


class TestMicroBatches:
    @settings(max_examples=30, deadline=None)
    @given(
        name=st.sampled_from(sorted(PRESETS)),
        seed=st.integers(0, 99),
        budget=st.integers(20, 200),
        shared=st.booleans(),
    )
    def test_no_micro_batch_split_padding_or_sharing_changes_the_gradient(
        self, name: str, seed: int, budget: int, shared: bool
    ) -> None:
        near = close_to(PolicyModel(exact_model()), some_groups(seed), spread=0.004 if "mask" in name else 0.15)
        whole, parts = (gradient(name, near, b, s) for b, s in ((999, True), (budget, shared)))
        assert relative(parts, whole) < 1e-6

    def test_a_small_budget_really_cuts(self) -> None:
        groups = some_groups(0)
        assert len(plan_micro_batches(groups, 20, shared_prefix=True)) > 3 * len(
            plan_micro_batches(groups, 1 << 16, shared_prefix=True)
        )

    @pytest.mark.parametrize("kind", list(Aggregate))
    def test_other_groups_of_the_batch_enter_the_normalizer(self, kind: Aggregate) -> None:
        groups = some_groups(3)
        alone, together = (gradient(Objective(aggregate=kind), part, 999, True) for part in (groups[:1], groups))
        other = gradient(Objective(aggregate=kind), groups[1:], 999, True)
        sizes = [sum(len(c.token_ids) for c in g.completions) for g in groups]
        if kind is not Aggregate.TOKEN_MEAN:
            sizes = [len(g.completions) for g in groups]
        expected = (alone * sizes[0] + other * sum(sizes[1:])) / sum(sizes)
        assert relative(together, expected) < 1e-6


def exact_model() -> GPT2LMHeadModel:
    """A model in float64 throughout, unlike a Llama, so that any difference beyond rounding is an error."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes)).double()


def gradient(objective: str | Objective, groups: list[Group], budget: int, shared: bool) -> torch.Tensor:
    """The gradient of the first update."""
    if isinstance(objective, str):
        objective = PRESETS[objective].objective
    trainer = a_trainer(objective, model=exact_model(), token_budget=max(budget, 64), length_limit=LENGTH_LIMIT)
    if not shared:
        trainer.check = ModelCheck(False, "asked for")
        trainer.policy_model.model.set_attn_implementation("sdpa")
    kept: list[torch.Tensor] = []

    def keep(step: int, norm: float | None = None) -> float:
        kept.extend(p.grad.clone().flatten() for p in trainer.policy_model.parameters())
        return 0.0

    trainer.optimizer.update = keep  # type: ignore[method-assign]
    trainer.settings = replace(trainer.settings, token_budget=budget)
    assert isinstance(trainer.train(groups), Trained)
    return torch.cat(kept)


class TestProximal:
    def test_at_the_first_update_policy_and_proximal_are_equal(self) -> None:
        """So one update of decoupled PPO does not depend on its clip."""
        objective = PRESETS["decoupled-ppo"].objective
        groups = lagged(2)
        wide, narrow = (
            moved(a_trainer(replace(objective, gate=replace(objective.gate, low=w, high=w))), groups)
            for w in (0.5, 0.0)
        )
        assert torch.equal(wide, narrow)

    def test_later_updates_are_gated_against_the_first(self) -> None:
        objective = PRESETS["decoupled-ppo"].objective
        groups = lagged(2)
        wide, narrow = (
            moved(
                a_trainer(replace(objective, gate=replace(objective.gate, low=w, high=w)), updates_per_batch=3), groups
            )
            for w in (0.5, 0.001)
        )
        assert not torch.allclose(wide, narrow)

    def test_the_proximal_policy_needs_no_forward_pass(self) -> None:
        trainer, passes = a_trainer(PRESETS["tis"].objective, updates_per_batch=3), []
        trainer.policy_model.register_forward_hook(lambda *_: passes.append(1))
        trainer.train(lagged(2))
        assert len(passes) == 3 + 1, "the drift of the step takes one"


class TestReference:
    def with_kl(self, **settings: object) -> Trainer:
        objective = Objective(regularizers=(KL(0.5),))
        return a_trainer(objective, reference=PolicyModel(a_llama(seed=1)), **settings)  # type: ignore[arg-type]

    def test_the_policy_is_pulled_towards_it(self) -> None:
        trainer, groups = self.with_kl(rate=3e-3), [equal_rewards(g) for g in some_groups(1)]
        figures = [trainer.train(groups).metrics["reference_kl"] for _ in range(30)]  # type: ignore[union-attr]
        assert figures[-1] < figures[0] / 2

    def test_it_is_refreshed_only_when_due(self) -> None:
        trainer, groups = self.with_kl(refresh_every=2), some_groups(1)
        first = [p.clone() for p in trainer.reference.parameters()]  # type: ignore[union-attr]
        trainer.train(groups)
        assert all(map(torch.equal, first, trainer.reference.parameters()))  # type: ignore[union-attr]
        trainer.train(groups)
        assert all(map(torch.equal, trainer.policy_model.parameters(), trainer.reference.parameters()))  # type: ignore[union-attr]

    def test_an_objective_and_a_reference_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(ValueError, match="give a second model"):
            a_trainer(Objective(regularizers=(KL(0.5),)))
        with pytest.raises(ValueError, match="leave `reference` out"):
            a_trainer(Objective(), reference=PolicyModel(a_llama()))


class TestDeterminism:
    @pytest.mark.parametrize("name", ["grpo-off-policy", "red-drop", "tis"])
    def test_the_same_groups_give_the_same_bits(self, name: str) -> None:
        runs = []
        for _ in range(2):
            trainer = a_trainer(PRESETS[name].objective, updates_per_batch=2, token_budget=64)
            runs.append([moved(trainer, lagged(seed)) for seed in range(3)])
        assert all(map(torch.equal, *runs))

    def test_red_drop_draws_by_group_id_and_not_by_position(self) -> None:
        groups = some_groups(1, count=4, size=5)
        here, there = (moved(a_trainer(PRESETS["red-drop"].objective), batch) for batch in (groups, groups[::-1]))
        assert relative(there, here) < 1e-4


def test_shrunk_advantages_use_the_prior_of_the_prompts() -> None:
    objective, groups = Objective(Advantage.SHRUNK), some_groups(1)
    with pytest.raises(ValueError, match=r"StepContext\.priors"):
        a_trainer(objective).train(groups)
    norms = []
    for prior in (1.0, 50.0):
        context = StepContext(priors={group.id: (prior, 1.0) for group in groups})
        done = a_trainer(objective).train(groups, context)
        assert isinstance(done, Trained)
        norms.append(done.metrics["grad_norm"])
    assert norms[1] > norms[0]  # a prompt known to be easy has little variance, so a surprise weighs more


def test_a_loss_mask_keeps_tokens_out_of_the_gradient_but_not_out_of_the_context() -> None:
    groups = some_groups(1)
    masked = [
        replace(g, completions=tuple(replace(c, loss_mask=np.arange(len(c.token_ids)) % 2 == 0) for c in g.completions))
        for g in groups
    ]
    done = a_trainer(Objective()).train(masked)
    assert isinstance(done, Trained)
    assert done.metrics["trained_tokens"] == sum(int(c.loss_mask.sum()) for g in masked for c in g.completions)
    assert not torch.equal(*(moved(a_trainer(Objective()), batch) for batch in (groups, masked)))


def test_training_raises_the_probability_of_rewarded_completions() -> None:
    trainer, groups = a_trainer(PRESETS["rec-oneside-nois"].objective, rate=1e-3), lagged(9)
    best = [max(range(4), key=lambda i, g=g: g.completions[i].score.reward) for g in groups]  # type: ignore[union-attr]

    def sums() -> torch.Tensor:
        scores = torch.stack([values.sum() for values in logprobs(copy.deepcopy(trainer.policy_model), groups)]).view(
            -1, 4
        )
        return scores[range(len(groups)), best] - scores.mean(-1)

    before = sums()
    for _ in range(3):
        trainer.train(groups)
    assert (sums() > before).all()


def test_every_metric_emitted_is_declared() -> None:
    trainer = a_trainer(PRESETS["grpo"].objective, updates_per_batch=2)
    done = trainer.train(lagged(1))
    assert isinstance(done, Trained)
    assert done.metrics.keys() <= METRICS.keys()
    assert all(figures.keys() <= METRICS.keys() for figures in done.by_lag.values())
    assert all(math.isfinite(value) for value in done.metrics.values())
