"""The tables of the experience log: their columns, and the digest that names a group's content.

One row is one group, so a group is atomic by construction. What belongs to its completions stands in lists of equal
length, one entry per completion and in the same order: a reader that wants only rewards reads only rewards, never a
token. DuckDB's `unnest(completion_ids), unnest(rewards)` and pandas' `explode([...])` line them up.

`_rowid`, which Lance adds to every row, is the row's place in commit order; see `table.py`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from offbeat.experience.lance_table import Table
from offbeat.types import UNKNOWN, Group, Score, Unscorable

SCHEMA_VERSION: Final = 1
"""Stands in every row of `groups`. A change that an earlier reader would misread raises it."""

_TOKENS = pa.list_(pa.int32())
SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

GROUPS: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("schema_version", pa.int32(), nullable=False),
        pa.field("digest", pa.string(), nullable=False),  # sha256 of the content as appended
        pa.field("appended_at", pa.float64(), nullable=False),  # unix seconds
        pa.field("writer", pa.string(), nullable=False),
        # What selects a group without reading its completions.
        pa.field("task", pa.string(), nullable=False),
        pa.field("oldest_version", pa.int32()),  # null: no version of ours took part
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
        pa.field("details", pa.list_(pa.string()), nullable=False),  # of the unscorable
        pa.field("breakdowns", pa.list_(pa.string()), nullable=False),  # JSON, or null
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
"""Late feedback. For one completion the last row in commit order counts."""

EVENTS: Final = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("cause", pa.string(), nullable=False),
        pa.field("by", pa.string(), nullable=False),
        pa.field("at", pa.float64(), nullable=False),
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
"""What the door refused, and why."""


def canonical(value: object) -> str:
    """JSON with one spelling per value: sorted keys, no spaces, ASCII.

    >>> canonical({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    return _ENCODE(value)


_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def digest(group: Group) -> str:
    """Sha256 of a group's content: the same for equal groups, whatever machine or process holds them.

    >>> from offbeat.types import Completion, Prompt
    >>> prompt = Prompt(id="p", token_ids=[1], task="arithmetic")
    >>> one = Group("g", prompt, (Completion("g/0", [4], UNKNOWN, source="human", score=Score(1)),))
    >>> two = Group("g", prompt, (Completion("g/0", [4], UNKNOWN, source="human", score=Score(0)),))
    >>> len(digest(one)), digest(one) == digest(two)
    (64, False)
    """
    prompt, completions = group.prompt, group.completions
    known = [c.behavior_logprobs for c in completions if c.behavior_logprobs is not UNKNOWN]
    about = [
        [
            *(c.id, len(c.token_ids), c.finish, c.source, c.behavior_logprobs is not UNKNOWN),
            [[int(span.version), int(span.start), int(span.end)] for span in c.versions],
            score_fields(c.score),
        ]
        for c in completions
    ]
    heading = [SCHEMA_VERSION, group.id, prompt.id, prompt.task, dict(prompt.columns), len(prompt.token_ids), about]
    hasher = hashlib.sha256(canonical(heading).encode())
    hasher.update(np.concatenate([prompt.token_ids, *(c.token_ids for c in completions)], dtype="<i4").data)
    if known:
        hasher.update(np.concatenate(known, dtype="<f4").data)
    hasher.update(np.concatenate([c.loss_mask for c in completions]).data)
    return hasher.hexdigest()


ScoreFields = tuple[float | None, str | None, str | None, str | None]
"""reward, unscorable reason, detail, breakdown as JSON."""


def score_fields(score: Score | Unscorable | None) -> ScoreFields:
    """A score as the four columns that hold it; four nulls while it is awaited.

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
    """The inverse of `score_fields`.

    >>> score_from(0.5, None, None, '{"correct":0.5}')
    Score(reward=0.5, breakdown={'correct': 0.5})
    """
    if reason is not None:
        return Unscorable(reason, detail or "")  # type: ignore[arg-type]  # the door admits the literals only
    if reward is None:
        return None
    return Score(reward, json.loads(breakdown) if breakdown else {})


@dataclass(frozen=True)
class Snapshot:
    """The log as it stood at one moment: how many rows each table had. Later rows and scores are not in it.

    It stays readable for ever: rows keep their places, so nothing has to be kept alive for it.

    >>> Snapshot.from_json(Snapshot(groups=3, scores=1, events=7, quarantine=0).to_json()).groups
    3
    """

    groups: int = 0
    scores: int = 0
    events: int = 0
    quarantine: int = 0

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, int]) -> "Snapshot":
        """The inverse of `to_json`."""
        return cls(**state)


@dataclass(frozen=True)
class Tables:
    """Groups, late scores, events and quarantine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     Tables.open(place).snapshot()
    Snapshot(groups=0, scores=0, events=0, quarantine=0)
    """

    groups: Table
    scores: Table
    events: Table
    quarantine: Table

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str] | None = None, *, create: bool = True) -> "Tables":
        """Open the tables under a URI; what is missing is created, or else it is an error."""
        root = uri.rstrip("/")
        return cls(
            *(
                Table(f"{root}/{name}.lance", schema, storage_options, create=create)
                for name, schema in (
                    ("groups", GROUPS),
                    ("scores", SCORES),
                    ("events", EVENTS),
                    ("quarantine", QUARANTINE),
                )
            )
        )

    def snapshot(self) -> Snapshot:
        """The log as it stands now.

        Groups are counted last: what a score or an event of the snapshot speaks of is in the snapshot too.
        """
        quarantine, events, scores = self.quarantine.rows(), self.events.rows(), self.scores.rows()
        return Snapshot(groups=self.groups.rows(), scores=scores, events=events, quarantine=quarantine)
