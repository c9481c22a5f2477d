"""What a step does with gates over the whole batch, truncated completions and shrunk advantages."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import a_llama, a_trainer, close_to, equal_rewards, lagged, moved, some_groups
from test_trainer import exact_model, gradient, relative

from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, CutOff, GroupESS, Objective, SecondMoment
from offbeat.trainer.batch import assemble_batch
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Finish, Group, Score, StepContext

M2PO, ESS = (PRESETS[name].objective for name in ("m2po", "ess-gate"))
TIGHT = {
    "m2po": replace(M2PO, gate=SecondMoment(0.01)),
    "ess-gate": replace(ESS, gate=replace(ESS.gate, low=1.0, high=9.0), reject=GroupESS(0.9)),
}
"""Gates that stop a part of the batches below. The clip of ess-gate is open, so that only the group gate acts."""


def stopped_share(objective: Objective, groups: list[Group]) -> float:
    done = a_trainer(objective, model=exact_model(), token_budget=64).train(groups)
    assert isinstance(done, Trained)
    return (done.metrics["gate_stopped_up"] + done.metrics["gate_stopped_down"]) / 2


class TestFirstLook:
    @pytest.mark.parametrize("name", TIGHT)
    @settings(max_examples=15, deadline=None)
    @given(seed=st.integers(0, 99), budget=st.integers(20, 200), shared=st.booleans())
    def test_the_gate_does_not_depend_on_the_cut_into_micro_batches(
        self, name: str, seed: int, budget: int, shared: bool
    ) -> None:
        near = close_to(PolicyModel(exact_model()), some_groups(seed, count=4), spread=0.15, seed=seed)
        whole, parts = (gradient(TIGHT[name], near, b, s) for b, s in ((999, True), (budget, shared)))
        assert relative(parts, whole) < 1e-6

    @pytest.mark.parametrize("name", TIGHT)
    def test_the_gate_stops_a_part_of_these_batches(self, name: str) -> None:
        shares = []
        for seed in range(6):
            near = close_to(PolicyModel(exact_model()), some_groups(seed, count=4), spread=0.15, seed=seed)
            shares.append(stopped_share(TIGHT[name], near))
        assert 0.05 < sum(shares) / len(shares) < 0.8

    @pytest.mark.parametrize("budget", [20, 40, 70])
    def test_equal_answers_are_stopped_together_however_they_are_packed(self, budget: int) -> None:
        (group,) = close_to(PolicyModel(exact_model()), some_groups(3, count=1), spread=0.3)
        copies = tuple(replace(group.completions[i % 2], id=f"g/{i}", score=Score(float(i % 2))) for i in range(8))
        group = replace(group, completions=copies)
        whole, parts = (gradient(TIGHT["m2po"], [group], b, True) for b in (999, budget))
        assert relative(parts, whole) < 1e-6

    @pytest.mark.parametrize("name", TIGHT)
    def test_it_costs_one_more_forward_pass_for_each_update(self, name: str) -> None:
        trainer, passes = a_trainer(PRESETS[name].objective, updates_per_batch=2), []
        trainer.policy_model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        trainer.train(lagged(2, spread=0.02))
        assert passes == [False, True] * 2 + [False], "the last one measures the step"

    def test_a_group_with_a_low_effective_sample_size_moves_nothing(self) -> None:
        groups = close_to(PolicyModel(exact_model()), some_groups(3, count=2), spread=0.01)
        far = groups[1].completions[0]
        shifted = replace(far, behavior_logprobs=far.behavior_logprobs - np.float32(3))  # its ratio is e³ per token
        groups[1] = replace(groups[1], completions=(shifted, *groups[1].completions[1:]))
        with_both = gradient(TIGHT["ess-gate"], groups, 999, True)
        alone = gradient(TIGHT["ess-gate"], groups[:1], 999, True)
        tokens = [sum(len(c.token_ids) for c in group.completions) for group in groups]
        assert relative(with_both * sum(tokens), alone * tokens[0]) < 1e-6, "its tokens still count"


def cut(group: Group, *which: int) -> Group:
    answers = tuple(replace(c, finish=Finish.LENGTH) if i in which else c for i, c in enumerate(group.completions))
    return replace(group, completions=answers)


def scored(group: Group, *rewards: float) -> Group:
    pairs = zip(group.completions, rewards, strict=True)
    return replace(group, completions=tuple(replace(c, score=Score(reward)) for c, reward in pairs))


class TestTruncated:
    def groups(self) -> list[Group]:
        first, second, third = some_groups(4, count=3)
        return [
            cut(scored(first, 1.0, 0.0, 0.0, 1.0), 2),
            cut(scored(second, 1.0, 0.0, 1.0, 0.0), 0, 1, 2),
            scored(third, 0.0, 0.0, 0.0, 1.0),
        ]

    def test_a_masked_one_enters_neither_baseline_nor_counts(self) -> None:
        groups = self.groups()
        count, mask = (assemble_batch(groups, Objective(truncated=how), step=0) for how in CutOff)
        assert count.credit.advantages_BG[0].tolist() == [0.5, -0.5, -0.5, 0.5]
        assert mask.credit.advantages_BG[0].tolist() == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])
        assert count.counts.sequences == 12 and mask.counts.sequences == 3 + 0 + 4
        lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
        assert mask.counts.tokens == sum(lengths[0]) - lengths[0][2] + sum(lengths[2])
        assert mask.ids(mask.credit.too_small_B) == (groups[1].id,)

    def test_masking_equals_leaving_them_out_of_the_group(self) -> None:
        groups = self.groups()
        left = [replace(g, completions=tuple(c for c in g.completions if c.finish is Finish.STOP)) for g in groups]
        masked = moved(a_trainer(Objective(truncated=CutOff.MASK)), groups)
        assert torch.equal(masked, moved(a_trainer(Objective()), left))
        assert not torch.equal(masked, moved(a_trainer(Objective()), groups))

    def test_a_fault_of_a_masked_completion_does_not_refuse_its_group(self) -> None:
        group = cut(scored(some_groups(4, count=1)[0], 1.0, 0.0, 1.0, 0.0), 0)
        broken = replace(group.completions[0], token_ids=[999], behavior_logprobs=[-1.0], loss_mask=[True], versions=())
        group = replace(group, completions=(broken, *group.completions[1:]))
        assert isinstance(a_trainer(Objective()).train([group]), RefusedBatch)
        assert isinstance(a_trainer(Objective(truncated=CutOff.MASK)).train([group]), Trained)


def even_priors(groups: list[Group]) -> StepContext:
    return StepContext(priors={group.id: (1.0, 1.0) for group in groups})


class TestShrunk:
    objective = Objective(Advantage.SHRUNK)

    def test_groups_of_equal_rewards_are_trained_on_and_still_reported(self) -> None:
        groups = [equal_rewards(group) for group in some_groups(1)]
        done = a_trainer(self.objective).train(groups, even_priors(groups))
        assert isinstance(done, Trained)
        assert done.groups == tuple(group.id for group in groups) and done.zero_variance == ()
        assert done.metrics["zero_variance_share"] == 1.0

    def test_a_reward_outside_the_unit_interval_is_a_fault_of_its_group(self) -> None:
        groups = [scored(group, 0.0, 1.0, 0.5, 1.0) for group in some_groups(1)]
        groups[1] = scored(groups[1], 0.0, 1.0, 2.0, 1.0)
        refused = a_trainer(self.objective).train(groups, even_priors(groups))
        assert isinstance(refused, RefusedBatch) and refused.faults.keys() == {groups[1].id}
        assert "reward 2.0, and shrunk advantages need rewards in [0, 1]" in refused.faults[groups[1].id]
        assert isinstance(a_trainer(Objective()).train(groups), Trained)


def test_a_model_that_moved_far_is_stopped_less_by_the_second_moment_than_by_a_clip() -> None:
    """The reason for M2PO: under large drift a clip stops many tokens, the second moment the outliers."""
    groups = close_to(PolicyModel(a_llama()), some_groups(5, count=6), spread=0.2)
    done = [a_trainer(PRESETS[name].objective).train(groups) for name in ("m2po", "grpo")]
    shares = [one.metrics["gate_stopped_up"] for one in done if isinstance(one, Trained)]
    assert len(shares) == 2 and shares[0] < shares[1]
