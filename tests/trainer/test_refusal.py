"""Groups and batches that must not change the policy are refused, with a reason."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import a_group, a_trainer, equal_rewards, lagged, moved, parameters, some_groups

from offbeat.errors import NoGradient
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Objective
from offbeat.trainer.trainer import RefusedBatch, Trained, Trainer
from offbeat.types import UNKNOWN, Completion, Group, Score, Unscorable


class TestRefusal:
    def test_a_broken_group_is_named_and_nothing_changes(self) -> None:
        trainer, groups = a_trainer(PRESETS["grpo"].objective), lagged(4)
        trainer.train(groups)
        before = snapshot(trainer)
        first = groups[1].completions[0]
        broken = replace(first, behavior_logprobs=np.full(len(first.token_ids), np.nan))
        groups[1] = replace(groups[1], completions=(broken, *groups[1].completions[1:]))
        refused = trainer.train(groups)
        assert isinstance(refused, RefusedBatch) and list(refused.faults) == [groups[1].id]
        assert "behavior log-probs are not finite" in refused.faults[groups[1].id]
        assert same(snapshot(trainer), before)

    def test_log_probs_that_overflow_name_the_groups_that_caused_it(self) -> None:
        groups = some_groups(6)
        marked = 7
        groups = [without_token(g, marked) for g in groups]
        culprit = replace(groups[2], prompt=replace(groups[2].prompt, token_ids=[marked]))
        trainer = a_trainer(Objective())
        with torch.no_grad():
            trainer.policy_model.model.get_input_embeddings().weight[marked] = math.inf
        before = snapshot(trainer)
        refused = trainer.train([*groups[:2], culprit])
        assert refused == RefusedBatch({culprit.id: "the policy's log-probs of it are not finite"})
        assert same(snapshot(trainer), before) and trainer.step == 0

    def test_a_gradient_that_overflows_refuses_the_update(self) -> None:
        trainer, huge = a_trainer(Objective(advantage=lambda rewards, _: rewards * 3e38)), some_groups(6)
        before = snapshot(trainer)
        refused = trainer.train(huge)
        assert isinstance(refused, RefusedBatch) and refused.faults.keys() == {g.id for g in huge}
        assert "norm" in next(iter(refused.faults.values()))
        assert same(snapshot(trainer), before)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"token_ids": [999, 1]}, "token id 999 is outside the model's vocabulary of 48"),
            ({"token_ids": [-1, 1]}, "token id -1 is outside"),
            ({"behavior_logprobs": UNKNOWN}, "its behavior log-probs are unknown, and this objective needs them"),
            ({"behavior_logprobs": [-math.inf, -1.0]}, "1 of 2 behavior log-probs are not finite"),
            ({"score": Score(math.nan)}, "reward nan"),
            (
                {"token_ids": [1] * 300, "behavior_logprobs": [-1.0] * 300, "loss_mask": None},
                "more than the token budget",
            ),
        ],
    )
    def test_a_group_that_cannot_be_trained_on_is_refused_with_its_reason(self, change: dict, reason: str) -> None:
        sound = a_group("g", np.random.default_rng(0), 3, [2, 2])
        broken = replace(sound, completions=(replace(sound.completions[0], **change), sound.completions[1]))
        refused = a_trainer(PRESETS["grpo"].objective, token_budget=128).train([broken])
        assert isinstance(refused, RefusedBatch) and reason in refused.faults["g"]

    def test_an_empty_prompt_is_refused(self) -> None:
        group = a_group("g", np.random.default_rng(0), 0, [2, 2])
        refused = a_trainer(Objective()).train([group])
        assert isinstance(refused, RefusedBatch) and "the prompt is empty" in refused.faults["g"]

    def test_a_later_update_that_is_refused_ends_the_step_with_the_updates_before_it(self) -> None:
        groups = some_groups(6)
        once, trainer = a_trainer(Objective(), rate=1e30), a_trainer(Objective(), rate=1e30, updates_per_batch=3)
        alone, done = once.train(groups), trainer.train(groups)
        assert isinstance(alone, Trained) and isinstance(done, Trained)
        assert done.updates == 1 and done.step == trainer.step == 1 and done.groups == tuple(g.id for g in groups)
        assert done.refused and set(done.refused) <= set(done.groups)
        assert "after update 1 of the step: a learning rate of 1e+30 is too high" in next(iter(done.refused.values()))
        assert torch.equal(parameters(trainer), parameters(once)), "only the first update was made"
        drifts = [one.metrics.pop("drift_step") for one in (alone, done)]
        assert all(map(math.isnan, drifts)) and done.overflowed == alone.overflowed != (), "the first update broke it"
        assert all(math.isfinite(value) for value in done.metrics.values()), "nothing is measured on the refused pass"
        assert done.metrics == alone.metrics and not alone.refused
        assert done.updates_made == alone.updates_made == 1

    def test_a_policy_that_a_step_has_broken_blames_the_learning_rate(self) -> None:
        trainer, groups = a_trainer(Objective(), rate=1e30), some_groups(6)
        assert isinstance(trainer.train(groups), Trained)
        refused = trainer.train(groups)
        assert isinstance(refused, RefusedBatch) and refused.faults.keys() == {group.id for group in groups}
        assert "a learning rate of 1e+30 is probably too high" in refused.faults[groups[0].id]

    def test_an_unscorable_completion_is_ignored(self) -> None:
        groups = some_groups(8)
        odd = replace(groups[0].completions[0], id="x", score=Unscorable("crash"), token_ids=[999], loss_mask=None)
        wider = [replace(groups[0], completions=(*groups[0].completions, odd)), *groups[1:]]
        assert torch.equal(*(moved(a_trainer(Objective()), batch) for batch in (groups, wider)))


class TestNoGradient:
    def test_equal_rewards_everywhere_raise_an_error(self) -> None:
        failed, *others = some_groups(1)
        wrong = tuple(replace(one, score=Score(0.0)) for one in failed.completions)
        groups = [replace(failed, completions=wrong), *map(equal_rewards, others)]
        trainer = a_trainer(Objective())
        before = snapshot(trainer)
        with pytest.raises(NoGradient, match="0 tokens had gradient: of 3 groups 3 have no difference in reward"):
            trainer.train(groups)
        assert same(snapshot(trainer), before)

    def test_one_reward_for_all_may_mean_that_the_prompts_are_solved(self) -> None:
        solved = [equal_rewards(group) for group in some_groups(1)]
        with pytest.raises(NoGradient, match=r"of 3 groups has reward 1\. If none is higher, the policy solves these"):
            a_trainer(Objective()).train(solved)

    def test_a_gate_that_stops_every_token_raises_an_error(self) -> None:
        trainer = a_trainer(PRESETS["rec-twoside"].objective)
        far = [
            replace(
                g, completions=tuple(replace(c, behavior_logprobs=[-40.0] * len(c.token_ids)) for c in g.completions)
            )
            for g in some_groups(1)
        ]
        before = snapshot(trainer)
        with pytest.raises(NoGradient, match="was stopped by the gate"):
            trainer.train(far)
        assert same(snapshot(trainer), before)

    def test_updates_end_early_when_the_gate_stops_every_token(self) -> None:
        done = a_trainer(PRESETS["rec-twoside"].objective, rate=0.3, updates_per_batch=9).train(lagged(3, spread=0.01))
        assert isinstance(done, Trained) and 1 <= done.updates < 9
        assert done.metrics["updates"] == done.updates

    def test_groups_without_contrast_cost_no_forward_pass_and_still_count(self) -> None:
        groups = some_groups(1)
        dull = [replace(equal_rewards(g), id=f"dull-{g.id}") for g in some_groups(2)]
        trainer, tokens = a_trainer(Objective()), []
        trainer.policy_model.register_forward_hook(
            lambda _, inputs, out: tokens.append(len(inputs[0].targets) * out.logprobs.requires_grad)
        )
        found = trainer.train([*groups, *dull])
        assert isinstance(found, Trained)
        assert sum(tokens) == sum(len(c.token_ids) for g in groups for c in g.completions)
        assert found.zero_variance == tuple(g.id for g in dull)
        assert found.metrics["trained_tokens"] > sum(tokens)


def snapshot(trainer: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in trainer.optimizer.tensors().values()] + [parameters(trainer)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def without_token(group: Group, token: int) -> Group:
    def spared(ids: np.ndarray) -> np.ndarray:
        return np.where(ids == token, token + 1, ids)

    answers: tuple[Completion, ...] = tuple(replace(c, token_ids=spared(c.token_ids)) for c in group.completions)
    return replace(group, prompt=replace(group.prompt, token_ids=spared(group.prompt.token_ids)), completions=answers)
