"""Conversion between groups and rows of the table `groups`: whole columns at a time, reading without copies."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Final, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offbeat.experience.schema import GROUPS, SCHEMA_VERSION, SPAN, canonical, score_fields, score_from
from offbeat.types import UNKNOWN, Completion, Finish, Group, Json, Prompt, Score, Unscorable, VersionSpan

READ: Final = [
    *("group_id", "task", "prompt_id", "prompt_token_ids", "prompt_columns"),
    *("completion_ids", "token_ids", "behavior_logprobs", "versions", "loss_masks", "finishes", "sources"),
    *("rewards", "unscorable", "details", "breakdowns", "run"),
]
"""The columns that `groups_from` needs."""


def _offsets(lengths: Iterable[int]) -> NDArray[np.int32]:
    sizes = np.fromiter(lengths, np.int64)
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{ends[-1]} tokens in one append, more than a column can index; append fewer groups at once"
        )
    return ends.astype(np.int32)


def _lists(offsets: NDArray[np.int32], values: pa.Array, missing: NDArray[np.bool_] | None = None) -> pa.ListArray:
    mask = None if missing is None or not missing.any() else pa.array(missing)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _flat(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> pa.Array:
    return pa.array(np.concatenate([np.empty(0, dtype), *arrays]))


def _streams(completions: Sequence[Completion]) -> dict[str, pa.Array]:
    """Return the per-token columns, with one list for each completion."""
    lengths = [len(c.token_ids) for c in completions]
    known = [c.behavior_logprobs for c in completions if c.behavior_logprobs is not UNKNOWN]
    unknown = np.array([c.behavior_logprobs is UNKNOWN for c in completions], np.bool_)
    starts = _offsets(lengths)[:-1]  # validation refuses empty completions
    all_trained = np.logical_and.reduceat(np.concatenate([c.loss_mask for c in completions]), starts)
    masks = [c.loss_mask for c, w in zip(completions, all_trained, strict=True) if not w]
    spans = [span for c in completions for span in c.versions]
    span_columns = [
        pa.array(np.fromiter((getattr(span, name) for span in spans), np.int32, len(spans)))
        for name in ("version", "start", "end")
    ]
    return {
        "token_ids": _lists(_offsets(lengths), _flat([c.token_ids for c in completions], np.int32)),
        "behavior_logprobs": _lists(
            _offsets(0 if u else n for n, u in zip(lengths, unknown, strict=True)), _flat(known, np.float32), unknown
        ),
        "versions": _lists(
            _offsets(len(c.versions) for c in completions), pa.StructArray.from_arrays(span_columns, fields=list(SPAN))
        ),
        "loss_masks": _lists(
            _offsets(0 if w else n for n, w in zip(lengths, all_trained, strict=True)),
            _flat(masks, np.bool_),
            all_trained,
        ),
    }


def group_rows(
    groups: Sequence[Group], digests: Sequence[str], *, appended_at: float, writer: str, run: str | None = None
) -> pa.Table:
    """Convert at least one valid group to rows of `groups`. Versions that name no run are those of `run`.

    >>> from offbeat.experience.schema import digest
    >>> prompt = Prompt(id="p", token_ids=[1], task="arithmetic")
    >>> group = Group("g", prompt, (Completion("g/0", [4, 2], UNKNOWN, source="human", score=Score(1.0)),))
    >>> rows = group_rows([group], [digest(group)], appended_at=0.0, writer="example")
    >>> groups_from(rows) == [group]
    True
    """
    completions = [c for g in groups for c in g.completions]
    per_group = _offsets(len(g.completions) for g in groups)
    rewards, reasons, details, breakdowns = zip(*(score_fields(c.score) for c in completions), strict=True)
    texts = {
        "completion_ids": [c.id for c in completions],
        "finishes": [str(c.finish) for c in completions],
        "sources": [c.source for c in completions],
        "unscorable": reasons,
        "details": details,
        "breakdowns": breakdowns,
    }
    columns: dict[str, object] = {
        "group_id": [g.id for g in groups],
        "schema_version": [SCHEMA_VERSION] * len(groups),
        "digest": list(digests),
        "appended_at": [appended_at] * len(groups),
        "writer": [writer] * len(groups),
        "run": [_run_of(g, run) for g in groups],
        "prompt_id": [g.prompt.id for g in groups],
        "task": [g.prompt.task for g in groups],
        "prompt_columns": [canonical(dict(g.prompt.columns)) for g in groups],
        "prompt_token_ids": _lists(
            _offsets(len(g.prompt.token_ids) for g in groups), _flat([g.prompt.token_ids for g in groups], np.int32)
        ),
        "rewards": _lists(per_group, pa.array(rewards, pa.float64())),
    }
    columns |= {name: _lists(per_group, pa.array(values, pa.string())) for name, values in texts.items()}
    columns |= {name: _lists(per_group, values) for name, values in _streams(completions).items()}
    columns |= _summaries(groups)
    arrays = {name: pa.array(v, GROUPS.field(name).type) if isinstance(v, list) else v for name, v in columns.items()}
    return pa.table(arrays, schema=GROUPS)


def _run_of(group: Group, run: str | None) -> str | None:
    """Return the run of a group's versions, which is one; None if it has no versions."""
    spans = next((one.versions for one in group.completions if one.versions), ())
    return (spans[0].run or run) if spans else None


def _summaries(groups: Sequence[Group]) -> dict[str, object]:
    scored, means, stds = zip(*(reward_figures(c.score for c in group.completions) for group in groups), strict=True)
    return {
        "oldest_version": [g.oldest_version for g in groups],
        "logprobs_known": [all(c.behavior_logprobs is not UNKNOWN for c in g.completions) for g in groups],
        "awaited": [sum(c.score is None for c in g.completions) for g in groups],
        "scored": list(scored),
        "reward_mean": list(means),
        "reward_std": list(stds),
        "tokens": [len(g.prompt.token_ids) + sum(len(c.token_ids) for c in g.completions) for g in groups],
    }


def reward_figures(scores: Iterable[Score | Unscorable | None]) -> tuple[int, float | None, float | None]:
    """Return the number of rewards, their mean and their population standard deviation.

    >>> reward_figures([Score(1.0), None, Score(0.0), Unscorable("timeout")])
    (2, 0.5, 0.5)
    """
    rewards = [float(score.reward) for score in scores if isinstance(score, Score)]
    if not rewards:
        return 0, None, None
    mean = sum(rewards) / len(rewards)
    return len(rewards), mean, math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _two_levels(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.bool_], pa.Array]:
    """Split a list of lists into the offsets of its inner lists, a mask of the null ones, and the flat values."""
    inner = column.combine_chunks().flatten()
    offsets = inner.offsets.to_numpy().astype(np.int64)
    return offsets, inner.is_null().to_numpy(zero_copy_only=False), inner.values


def groups_from(rows: pa.Table) -> list[Group]:
    """Convert rows of `groups` to groups. Their arrays are views of the rows: nothing is copied."""
    names = {name: rows[name].to_pylist() for name in ("group_id", "prompt_id", "task", "prompt_columns", "run")}
    flat = {
        name: rows[name].combine_chunks().flatten().to_pylist()
        for name in ("completion_ids", "finishes", "sources", "rewards", "unscorable", "details", "breakdowns")
    }
    token_at, _, tokens = _two_levels(rows["token_ids"])
    logprob_at, unknown, logprobs = _two_levels(rows["behavior_logprobs"])
    mask_at, all_trained, masks = _two_levels(rows["loss_masks"])
    span_at, _, spans = _two_levels(rows["versions"])
    token_values, logprob_values = tokens.to_numpy(), logprobs.to_numpy()
    mask_values = masks.to_numpy(zero_copy_only=False)
    sizes = rows["completion_ids"].combine_chunks().value_lengths().to_pylist()
    runs = np.repeat(np.repeat(np.array(names["run"], object), sizes), np.diff(span_at)).tolist()
    span_fields = (spans.field(i).to_pylist() for i in range(3))
    span_values = [VersionSpan(*span) for span in zip(*span_fields, runs, strict=True)]
    every_token = np.ones(int(np.diff(token_at).max(initial=0)), np.bool_)
    every_token.flags.writeable = False
    completions = [
        Completion(
            id=flat["completion_ids"][i],
            token_ids=token_values[token_at[i] : token_at[i + 1]],
            behavior_logprobs=UNKNOWN if unknown[i] else logprob_values[logprob_at[i] : logprob_at[i + 1]],
            versions=tuple(span_values[span_at[i] : span_at[i + 1]]),
            loss_mask=every_token[: token_at[i + 1] - token_at[i]]
            if all_trained[i]
            else mask_values[mask_at[i] : mask_at[i + 1]],
            finish=Finish(flat["finishes"][i]),
            source=flat["sources"][i],
            score=score_from(flat["rewards"][i], flat["unscorable"][i], flat["details"][i], flat["breakdowns"][i]),
        )
        for i in range(len(flat["completion_ids"]))
    ]
    starts = _offsets(sizes)
    prompts = rows["prompt_token_ids"].combine_chunks()
    prompt_at, prompt_values = prompts.offsets.to_numpy(), prompts.values.to_numpy()
    return [
        Group(
            id=names["group_id"][g],
            prompt=Prompt(
                id=names["prompt_id"][g],
                token_ids=prompt_values[prompt_at[g] : prompt_at[g + 1]],
                task=names["task"][g],
                columns=cast("dict[str, Json]", json.loads(names["prompt_columns"][g])),
            ),
            completions=tuple(completions[starts[g] : starts[g + 1]]),
        )
        for g in range(rows.num_rows)
    ]
