"""Rows of a host and groups, each as the other: plain rows to groups, groups to padded tensors.

A version is the host's step count when the weights were loaded that generated. Tensors have prompts padded on the left
and completions on the right, as TRL, verl and Trinity-RFT keep them.

Shapes: N rows of B groups of `size`, T tokens of the longest completion.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.objective.measures import NO_LAG
from offbeat.types import UNKNOWN, Completion, Finish, Group, Json, Prompt, Score, Unscorable, VersionSpan, is_reward


@dataclass(frozen=True)
class HostRow:
    """One completion as a host has it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """Of the policy that generated; None, or a NaN among them: not known."""
    reward: float
    """NaN if no reward function could score it."""
    version: int | None
    """The host's step count when the weights were loaded that generated; None: not of this run's policy."""
    truncated: bool = False
    loss_mask: Sequence[bool] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """The weighted rewards that add up to the reward, by function."""
    columns: Mapping[str, Json] = field(default_factory=dict)
    """Of the prompt, for scoring again, and ids of the host."""


def groups_of(rows: Sequence[HostRow], size: int, *, prefix: str, task: str, first: int = 0) -> list[Group]:
    """Return groups of `size` consecutive rows. Ids are the prefix and a number that counts from `first`.

    >>> rows = [HostRow([1, 2], [5, i], [-0.1, -0.7], float(i == 3), version=4) for i in (3, 4)]
    >>> [group] = groups_of(rows, 2, prefix="g 81f30d94", task="sums")
    >>> group.id, group.oldest_version, [one.score.reward for one in group.completions]
    ('g 81f30d94-0', 4, [1.0, 0.0])
    """
    groups = []
    for number in range(len(rows) // size):
        members = rows[number * size : (number + 1) * size]
        name, head = f"{prefix}-{first + number}", members[0]
        ids = np.asarray(head.prompt_ids, np.int32)
        digest = blake2b(ids.tobytes(), digest_size=8).hexdigest()
        completions = tuple(_completion(f"{name}/{i}", row) for i, row in enumerate(members))
        groups.append(Group(name, Prompt(digest, ids, task, dict(head.columns)), completions))
    return groups


def _completion(name: str, row: HostRow) -> Completion:
    known = row.logprobs is not None and not np.isnan(row.logprobs).any()
    return Completion(
        name,
        np.asarray(row.token_ids, np.int32),
        np.minimum(np.asarray(row.logprobs, np.float32), 0) if known else UNKNOWN,  # rounding may end above 0
        () if row.version is None else (VersionSpan(row.version, 0, len(row.token_ids)),),
        None if row.loss_mask is None else np.asarray(row.loss_mask, np.bool_),  # type: ignore[arg-type]
        Finish.LENGTH if row.truncated else Finish.STOP,
        "model" if row.version is None else "policy",
        Score(row.reward, dict(row.parts))
        if is_reward(row.reward)
        else Unscorable("invalid", f"no reward function could score it: {row.reward}"),
    )


def plain(columns: Mapping[str, object]) -> dict[str, Json]:
    """Return the columns that JSON can hold, without the prompt.

    >>> plain({"prompt": "2 + 2", "answer": 4, "image": object()})
    {'answer': 4}
    """
    found: dict[str, Json] = {}
    for name, value in columns.items():
        try:
            found |= {} if name == "prompt" else {name: json.loads(json.dumps(value))}
        except (TypeError, ValueError):
            continue
    return found


def scores_of(groups: Sequence[Group], size: int) -> tuple[Tensor, Tensor]:
    """Return rewards and whether there is one, [B, size]; a group may have fewer completions."""
    rewards_BG = torch.zeros(len(groups), size, dtype=torch.float64)
    scored_BG = torch.zeros(len(groups), size, dtype=torch.bool)
    for b, group in enumerate(groups):
        for g, one in enumerate(group.completions):
            if isinstance(one.score, Score):
                rewards_BG[b, g], scored_BG[b, g] = one.score.reward, True
    return rewards_BG, scored_BG


def left_right(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], fill: int) -> dict[str, Tensor]:
    """Return prompts padded on the left and answers on the right with the token `fill`, and which tokens are real.

    >>> rows = left_right([[1], [1, 2]], [[5, 6], [7]], 0)
    >>> rows["prompt_ids"].tolist(), rows["completion_ids"].tolist(), rows["completion_mask"].tolist()
    ([[0, 1], [1, 2]], [[5, 6], [7, 0]], [[1, 1], [1, 0]])
    """
    before, after = max(map(len, prompts)), max(map(len, answers))
    ids = torch.full((len(prompts), before + after), fill)
    real = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        span = slice(before - len(prompt), before + len(answer))
        ids[row, span], real[row, span] = torch.tensor([*prompt, *answer]), 1
    tensors = {"prompt_ids": ids[:, :before], "prompt_mask": real[:, :before]}
    return tensors | {"completion_ids": ids[:, before:], "completion_mask": real[:, before:]}


def rows_of(groups: Sequence[Group], size: int, *, k: int, fill: int) -> dict[str, Tensor]:
    """Return groups as the rows of a batch of step k: ids, masks, `behavior` log-probs (NaN: unknown) and `lags`.

    A group with fewer completions than `size` gets rows without tokens to train on.

    >>> answers = tuple(Completion(f"g/{i}", [5, i], [-0.1, -0.7], (VersionSpan(3, 0, 2),)) for i in (3, 4))
    >>> rows = rows_of([Group("g", Prompt("p", [1, 2], "sums"), answers)], 3, k=7, fill=0)
    >>> rows["completion_ids"].tolist(), rows["lags"].tolist(), rows["mask"].any(-1).tolist()
    ([[5, 3], [5, 4], [0, 0]], [[4, 4], [4, 4], [-1, -1]], [True, True, False])
    """
    members = [(group.prompt, one) for group in groups for one in (*group.completions, *[None] * size)[:size]]
    answers = [[fill] if one is None else one.token_ids.tolist() for _, one in members]
    rows = left_right([prompt.token_ids.tolist() for prompt, _ in members], answers, fill)
    shape = rows["completion_ids"].shape
    rows |= {"mask": torch.zeros(shape, dtype=torch.bool), "behavior": torch.full(shape, torch.nan)}
    rows["lags"] = torch.full(shape, NO_LAG)
    for row, (_, one) in enumerate(members):
        if one is None:
            continue
        rows["mask"][row, : len(one.loss_mask)] = torch.tensor(one.loss_mask)
        if one.behavior_logprobs is not UNKNOWN:
            rows["behavior"][row, : len(one.loss_mask)] = torch.tensor(one.behavior_logprobs)
        for span in one.versions:
            rows["lags"][row, span.start : span.end] = max(k - span.version, NO_LAG)
    return rows


def joined(first: Tensor, second: Tensor, *, left: bool = False, fill: float = 0) -> Tensor:
    """Return the rows of both, padded to the longer ones on the right, or on the left.

    >>> joined(torch.tensor([[1, 2]]), torch.tensor([[3]]), left=True).tolist()
    [[1, 2], [0, 3]]
    """
    rows = [first, second.to(first)]
    if first.ndim > 1:
        width = max(one.shape[1] for one in rows)
        missing = [width - one.shape[1] for one in rows]
        rows = [pad(one, (n, 0) if left else (0, n), value=fill) for one, n in zip(rows, missing, strict=True)]
    return torch.cat(rows)
