"""The four tables of the experience log: columns, snapshots, digests of content, and groups as rows.

One row is one group, so a group is atomic by construction. The data of its completions is in lists of equal length,
one entry for each completion and in the same order: reading only the rewards never reads a token. DuckDB's
`unnest(completion_ids), unnest(rewards)` and pandas' `explode([...])` align them. Groups become rows and rows groups
whole columns at a time, and reading copies nothing.

`_rowid`, which Lance adds to every row, is the row's position in commit order; see `lance_table.py`.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offbeat.errors import LogReadError
from offbeat.experience.lance_table import Table, exists, written_versions
from offbeat.storage.files import local_path, require_plain_tree
from offbeat.types import UNKNOWN, Completion, Finish, Group, Json, Prompt, Score, Unscorable, VersionSpan

SCHEMA_VERSION: Final = 1
"""Written into every row of `groups`. Raise it for a change that an earlier reader would misread."""

_TOKENS = pa.list_(pa.int32())
SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

GROUPS: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),  # sha256 of the content as appended
        pa.field("appended_at", pa.float64(), nullable=False),  # unix seconds
        pa.field("writer", pa.string(), nullable=False),
        # Columns for selecting groups without reading their completions.
        pa.field("task", pa.string(), nullable=False),
        pa.field("oldest_version", pa.int32()),  # null: no completion has a policy version
        pa.field("logprobs_known", pa.bool_(), nullable=False),  # for every completion
        pa.field("scored", pa.int32(), nullable=False),  # completions with a reward
        pa.field("awaited", pa.int32(), nullable=False),  # completions whose feedback was awaited
        pa.field("reward_mean", pa.float64()),  # null: nothing scored
        pa.field("reward_std", pa.float64()),  # of the population, not of a sample
        pa.field("tokens", pa.int64(), nullable=False),  # of the prompt and of all completions
        # The prompt.
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        pa.field("prompt_columns", pa.string(), nullable=False),  # JSON
        # The completions: lists of equal length.
        pa.field("completion_ids", pa.list_(pa.string()), nullable=False),
        pa.field("token_ids", pa.list_(_TOKENS), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.list_(pa.float32())), nullable=False),  # null inside: unknown
        pa.field("versions", pa.list_(pa.list_(SPAN)), nullable=False),
        pa.field("loss_masks", pa.list_(pa.list_(pa.bool_())), nullable=False),  # null inside: every token counts
        pa.field("finishes", pa.list_(pa.string()), nullable=False),
        pa.field("sources", pa.list_(pa.string()), nullable=False),
        pa.field("rewards", pa.list_(pa.float64()), nullable=False),  # null inside: awaited or unscorable
        pa.field("unscorable", pa.list_(pa.string()), nullable=False),  # the reason, or null
        pa.field("details", pa.list_(pa.string()), nullable=False),  # details of unscorable completions
        pa.field("breakdowns", pa.list_(pa.string()), nullable=False),  # JSON, or null
        pa.field("run", pa.string()),  # the run whose versions `versions` names; null: no versions, or not recorded
    ]
)

SCORES: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("completion_id", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),  # null: unscorable
        pa.field("unscorable", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("breakdown", pa.string()),  # JSON
        pa.field("scored_at", pa.float64(), nullable=False),
        pa.field("scorer", pa.string(), nullable=False),
    ]
)
"""Late feedback. The last row for a completion, in commit order, counts."""

EVENTS: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("cause", pa.string(), nullable=False),
        pa.field("by", pa.string(), nullable=False),
        pa.field("at", pa.float64(), nullable=False),
        pa.field("drift", pa.float64()),  # of a trained group: mean (1 - π_k/α)₊; null: unknown
        pa.field("ess", pa.float64()),
        pa.field("updates", pa.int32()),  # of a trained group: updates of its step; null: an earlier version
        pa.field("run", pa.string()),  # the run that recorded it; null: no run, or not recorded
    ]
)
"""What happened to groups; the ledger is computed from it."""

QUARANTINE: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # group or score
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),  # JSON of what was refused
        pa.field("writer", pa.string(), nullable=False),
        pa.field("at", pa.float64(), nullable=False),
    ]
)
"""What validation refused, and why."""


SEAL: Final = pa.field("seal", pa.string())
"""The last column: writer, number of the row, and a hash of both and of what is no list. Null: an earlier version."""
_TABLES = {"groups": GROUPS, "scores": SCORES, "events": EVENTS, "quarantine": QUARANTINE}
SCHEMAS: Final = {name: schema.append(SEAL) for name, schema in _TABLES.items()}
"""The tables of a log by name, in the order in which they are created."""
FLAT: Final = {name: [one.name for one in schema if not pa.types.is_list(one.type)] for name, schema in SCHEMAS.items()}
"""By table, the seal and the columns that it covers: `digest` covers the others."""


def seal_rows(rows: pa.Table, chain: str, first: int) -> pa.Table:
    """Return the rows with seals, numbered from `first` in the chain of a writer."""
    seals = [_seal(f"{chain}-{number}", text) for number, text in enumerate(_flat_texts(rows), first)]
    return rows.append_column(SEAL, pa.array(seals, pa.string()))


def _seal(place: str, text: bytes) -> str:
    return f"{place}-{hashlib.sha256(place.encode() + text).hexdigest()[:16]}"


def _flat_texts(rows: pa.Table) -> list[bytes]:
    """Encode the columns of each row that are no lists. Nulls are left out, so that a later column changes no seal."""
    parts = []
    for name in sorted(one.name for one in rows.schema if not pa.types.is_list(one.type)):
        column = rows[name].combine_chunks()
        text = pc.cast(column.view(pa.int64()) if pa.types.is_floating(column.type) else column, pa.string())
        parts.append(pc.binary_join_element_wise(name.encode(), pc.cast(text, pa.binary()), b"="))
    return cast("list[bytes]", pc.binary_join_element_wise(*parts, b"\0", null_handling="skip").to_pylist())


class SealCheck:
    """Compares rows with their seals. Each writer numbers its rows, so a row that is lost or repeated is seen too.

    >>> rows, check = seal_rows(pa.table({"step": [4, 5, 6]}), "c0ffee12", 0), SealCheck()
    >>> check.add(rows.take([0, 2])).tolist(), check.wrong
    ([True, True], ['row 1 has number 2 of its writer instead of 1'])
    """

    def __init__(self) -> None:
        self.rows, self.unsealed, self._next = 0, 0, Counter[str]()
        self.wrong: list[str] = []

    @classmethod
    def of(cls, table: Table, name: str) -> "SealCheck":
        """Check all rows of a table of a log."""
        check, stop = cls(), table.rows()
        for start in range(0, stop, 1 << 16):
            check.add(table.scan(start, min(start + (1 << 16), stop), FLAT[name]))
        return check

    def add(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Check the next rows of a table; return which of them are as they were written."""
        seals = pc.cast(rows["seal"], pa.binary()).to_pylist()
        texts = _flat_texts(rows.select([name for name in rows.column_names if name not in ("seal", "_rowid")]))
        return np.array([self._is_whole(*row) for row in zip(seals, texts, strict=True)], np.bool_)

    def _is_whole(self, seal: bytes | None, text: bytes) -> bool:
        self.rows += 1
        if seal is None and not self._next:  # of an earlier version: later ones seal every row
            self.unsealed += 1
            return True
        place = (seal or b"").decode(errors="replace").rpartition("-")[0]
        if seal is None or seal != _seal(place, text).encode():
            self.wrong.append(f"row {self.rows - 1} is not as it was written")
            return False
        chain, number = place[:8], int(place[9:])
        if number != self._next[chain]:
            self.wrong.append(f"row {self.rows - 1} has number {number} of its writer instead of {self._next[chain]}")
        self._next[chain] = number + 1
        return True


def canonical(value: object) -> str:
    """Encode a value as JSON in a unique form: sorted keys, no spaces, ASCII."""
    return _ENCODE(value)


_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def digest(group: Group) -> str:
    """Return the sha256 of a group's content: the same for equal groups on every machine.

    The run of its versions is not part of it: that is where the group comes from, as is the writer.

    >>> from offbeat.types import Completion, Prompt
    >>> prompt = Prompt(id="p", token_ids=[1], task="arithmetic")
    >>> one = Group("g", prompt, (Completion("g/0", [4], UNKNOWN, source="human", score=Score(1)),))
    >>> two = Group("g", prompt, (Completion("g/0", [4], UNKNOWN, source="human", score=Score(0)),))
    >>> len(digest(one)), digest(one) == digest(two)
    (64, False)
    """
    prompt, completions = group.prompt, group.completions
    known = [c.behavior_logprobs for c in completions if c.behavior_logprobs is not UNKNOWN]
    described = [
        [
            *(c.id, len(c.token_ids), c.finish, c.source, c.behavior_logprobs is not UNKNOWN),
            [[int(span.version), int(span.start), int(span.end)] for span in c.versions],
            score_fields(c.score),
        ]
        for c in completions
    ]
    header = [SCHEMA_VERSION, group.id, prompt.id, prompt.task, dict(prompt.columns), len(prompt.token_ids), described]
    hasher = hashlib.sha256(canonical(header).encode())
    hasher.update(np.concatenate([prompt.token_ids, *(c.token_ids for c in completions)], dtype="<i4").data)
    if known:
        hasher.update(np.concatenate(known, dtype="<f4").data)
    hasher.update(np.concatenate([c.loss_mask for c in completions]).data)
    return hasher.hexdigest()


ScoreFields = tuple[float | None, str | None, str | None, str | None]
"""Reward, reason if unscorable, detail, breakdown as JSON."""


def score_fields(score: Score | Unscorable | None) -> ScoreFields:
    """Return a score as four columns: four nulls while feedback is awaited.

    >>> score_fields(Unscorable("timeout", "after 2.0 s"))
    (None, 'timeout', 'after 2.0 s', None)
    """
    match score:
        case None:
            return (None, None, None, None)
        case Unscorable(reason, detail):
            return (None, reason, detail, None)
        case Score(reward, breakdown):
            parts = {name: float(part) for name, part in breakdown.items()}
            return (float(reward), None, None, canonical(parts) if parts else None)


def score_from(
    reward: float | None, reason: str | None, detail: str | None, breakdown: str | None
) -> Score | Unscorable | None:
    """Return the score that `score_fields` converted."""
    if reason is not None:
        return Unscorable(reason, detail or "")  # type: ignore[arg-type]  # validation allows only the literals
    if reward is None:
        return None
    return Score(reward, json.loads(breakdown) if breakdown else {})


@dataclass(frozen=True)
class Snapshot:
    """The log at one moment: how many rows each table had. Later rows and scores are not part of it.

    A snapshot stays readable forever without keeping a version alive, because rows never change their positions.
    """

    groups: int = 0
    scores: int = 0
    events: int = 0
    quarantine: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counts by table name."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, int]) -> "Snapshot":
        """Return the snapshot that `to_json` converted."""
        return cls(**state)


@dataclass(frozen=True)
class Tables:
    """The four tables of a log."""

    groups: Table
    scores: Table
    events: Table
    quarantine: Table

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str] | None = None, *, create: bool = True) -> "Tables":
        """Open the tables under a URI. A new log is created, or an error if `create` is False.

        A log that has lost some of its tables is always an error: an empty table would hide the loss.
        """
        root = uri.rstrip("/")
        if place := local_path(root):
            require_plain_tree(place)
        if lost := lost_tables(root, storage_options):
            raise LogReadError(
                f"the experience log {root} has lost {' and '.join(lost)}, although its other tables are there. Restore"
                f" {'it' if len(lost) == 1 else 'them'} from a copy, or start a new run; `offbeat fsck` lists what is"
                " whole"
            )
        return cls(
            *(Table(f"{root}/{name}.lance", schema, storage_options, create=create) for name, schema in SCHEMAS.items())
        )

    def snapshot(self) -> Snapshot:
        """Return the current row counts.

        Groups are counted last, so the group of every score and event in the snapshot is in the snapshot too.
        """
        quarantine, events, scores = self.quarantine.rows(), self.events.rows(), self.scores.rows()
        return Snapshot(groups=self.groups.rows(), scores=scores, events=events, quarantine=quarantine)


def lost_tables(root: str, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the file names of the tables that a log once had and that are gone.

    >>> lost_tables("no/such/log")
    []
    """
    uris = {name: f"{root}/{name}.lance" for name in SCHEMAS}
    # Tables are created in this order, and nothing is added before all exist: a first start may have been killed.
    # Look at the last one first: while another process creates the log, what is there is then always a beginning of it.
    there = [name for name in reversed(SCHEMAS) if exists(uris[name], storage_options)][::-1]
    missing = [name for name in SCHEMAS if name not in there]
    if not there or not missing:
        return []
    unfinished = there == list(SCHEMAS)[: len(there)]
    if unfinished and all(written_versions(uris[name], storage_options) == 1 for name in there):
        return []
    # Another process may have created the log since the first look.
    return [f"{name}.lance" for name in missing if not exists(uris[name], storage_options)]


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
