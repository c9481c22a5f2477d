"""A fault in a later update of a batch ends the step with the updates made before it."""

import math
from dataclasses import replace

import pytest
import torch
from small import a_trainer, parameters, some_groups

from offbeat.objective.spec import Objective
from offbeat.trainer.trainer import Trained
from offbeat.types import Group

MARKED = 7


def without_marked(group: Group) -> Group:
    answers = tuple(replace(c, token_ids=[t if t != MARKED else 8 for t in c.token_ids]) for c in group.completions)
    prompt = replace(group.prompt, token_ids=[t if t != MARKED else 8 for t in group.prompt.token_ids])
    return replace(group, prompt=prompt, completions=answers)


def test_a_step_ends_with_the_updates_before_a_refused_one_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [without_marked(group) for group in some_groups(6)]
    faulty = replace(groups[2], prompt=replace(groups[2].prompt, token_ids=[MARKED]))
    batch = [*groups[:2], faulty]
    trainer = a_trainer(Objective(), updates_per_batch=4)
    update, made = trainer.optimizer.update, []

    def overflow_after_the_second(step: int, norm: float) -> float:
        rate = update(step, norm)
        made.append(step)
        if len(made) == 2:
            with torch.no_grad():
                trainer.policy_model.model.get_input_embeddings().weight[MARKED] = math.inf
        return rate

    monkeypatch.setattr(trainer.optimizer, "update", overflow_after_the_second)
    done = trainer.train(batch)
    assert isinstance(done, Trained)
    assert (done.step, trainer.step, done.updates, made) == (1, 1, 2, [0, 0])
    assert done.groups == tuple(group.id for group in batch), "all groups of the step count as trained"
    assert list(done.refused) == [faulty.id]
    assert done.refused[faulty.id].startswith("the policy's log-probs of it are not finite after update 2 of the step")
    assert done.updates_made == trainer.optimizer.updates == 2
    assert math.isnan(done.metrics.pop("drift_step")) and "master/model.model.embed_tokens.weight" in done.overflowed
    assert all(math.isfinite(value) for value in done.metrics.values()), "nothing is measured on the refused pass"
    again = trainer.train(groups[:2])
    assert isinstance(again, Trained) and again.step == 2 and again.refused == {}
    assert parameters(trainer).isfinite().sum() >= len(parameters(trainer)) - 32
