"""The four tables of the experience log: columns, snapshots, and the digest that identifies a group's content.

One row is one group, so a group is atomic by construction. The data of its completions is in lists of equal length,
one entry for each completion and in the same order: reading only the rewards never reads a token. DuckDB's
`unnest(completion_ids), unnest(rewards)` and pandas' `explode([...])` align them.

`_rowid`, which Lance adds to every row, is the row's position in commit order; see `lance_table.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from offbeat.errors import LogReadError
from offbeat.experience.lance_table import Table, exists, written_versions
from offbeat.types import UNKNOWN, Group, Score, Unscorable

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
        # Added after 0.1.0.
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


SCHEMAS: Final = {"groups": GROUPS, "scores": SCORES, "events": EVENTS, "quarantine": QUARANTINE}
"""The tables of a log by name, in the order in which they are created."""


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
