"""Groups that no step can train on: broken prompts, rewards, log-probs and token ids, found before the forward pass."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.objective.spec import Advantage, CutOff, Need, Objective
from offbeat.types import (
    UNKNOWN,
    Completion,
    Finish,
    Group,
    Score,
    invalid_logprobs,
    is_finite_number,
    outside_vocabulary,
)


def find_faults(groups: Sequence[Group], objective: Objective, *, token_budget: int, vocab_size: int) -> dict[str, str]:
    """Return the groups that no step can train on: by id, with the reason.

    >>> from offbeat.types import Prompt
    >>> broken, valid = (Completion(f"g/{i}", [5], [x], score=Score(1.0)) for i, x in enumerate([float("nan"), -1.0]))
    >>> group = Group("g", Prompt("p", [1], "t"), (broken, valid))
    >>> find_faults([group], Objective(), token_budget=64, vocab_size=10)
    {'g': 'completion g/0: 1 of 1 behavior log-probs are not finite'}
    """
    found = {}
    for group in groups:
        faults = [_prompt_fault(group, vocab_size)]
        for completion in group.completions:
            if isinstance(score := completion.score, Score) and not _masked(completion, score, objective):
                faults.append(_completion_fault(group, completion, score, objective, token_budget, vocab_size))
        if reasons := [fault for fault in faults if fault]:
            found[group.id] = "; ".join(reasons)
    return found


def _masked(completion: Completion, score: Score, objective: Objective) -> bool:
    """Return True for a truncated completion that the objective leaves out. The mean reward still counts its score."""
    left_out = objective.truncated is CutOff.MASK and completion.finish is Finish.LENGTH
    return left_out and is_finite_number(score.reward)


def _prompt_fault(group: Group, vocab_size: int) -> str | None:
    ids = group.prompt.token_ids
    if len(ids) == 0:
        return "the prompt is empty: no state predicts a first token"
    return _token_id_fault("the prompt", ids, vocab_size)


def _completion_fault(
    group: Group, completion: Completion, score: Score, objective: Objective, token_budget: int, vocab_size: int
) -> str | None:
    """Return the first fault of a scored completion."""
    name, tokens = f"completion {completion.id}", len(group.prompt.token_ids) + len(completion.token_ids)
    if not is_finite_number(score.reward):
        return f"{name}: reward {score.reward}"
    if objective.advantage is Advantage.SHRUNK and not 0 <= score.reward <= 1:
        return f"{name}: reward {score.reward}, and shrunk advantages need rewards in [0, 1]"
    if tokens > token_budget:
        return f"{name}: {tokens} tokens with its prompt, more than the token budget of {token_budget}"
    if completion.behavior_logprobs is UNKNOWN:
        if Need.BEHAVIOR in objective.needs:
            return f"{name}: its behavior log-probs are unknown, and this objective needs them"
    else:
        logprobs: NDArray[np.float32] = completion.behavior_logprobs[completion.loss_mask]
        if wrong := int(invalid_logprobs(logprobs, allow_positive=True).sum()):
            return f"{name}: {wrong} of {len(logprobs)} behavior log-probs are not finite"
    return _token_id_fault(name, completion.token_ids, vocab_size)


def _token_id_fault(name: str, ids: NDArray[np.int32], vocab_size: int) -> str | None:
    outside = outside_vocabulary(ids, vocab_size)
    return f"{name}: token id {outside[0]} is outside the model's vocabulary of {vocab_size}" if len(outside) else None
