"""The run directory of a run inside a host: its groups, their fates, and figures by step.

    host's rows ── rows.groups_of ── Books.write ──► experience log ──► Books.draw ── the host's next batch

It is a run directory like any other, without weights and checkpoints, which the host keeps: `offbeat report`, `view`,
`score`, `feedback` and `log` take it. A host that resumes at an earlier step gives its state back: steps after it are
cancelled, and groups of versions that it has not reached again are superseded.
"""

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np

from offbeat.config import Config, parse
from offbeat.errors import LogReadError, RunError
from offbeat.events import EventKind
from offbeat.experience.index import CLOSED, NO_VERSION, DrawCounts, Index
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Candidates
from offbeat.experience.sampler import EQUAL_REWARDS
from offbeat.experience.schema import Snapshot
from offbeat.inside.rows import HostRow, groups_of
from offbeat.objective.measures import StepFigures
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import FileJournal, rewards_by_version
from offbeat.types import UNKNOWN, Group, Json, invalid_logprobs, outside_vocabulary


class Books:
    """What a run inside a host keeps.

    >>> import tempfile
    >>> rows = [HostRow([1, 2], [5, i], [-0.1, -0.7], float(i == 3), version=0) for i in (3, 4)]
    >>> with tempfile.TemporaryDirectory() as place:
    ...     books = Books(place, host="trl")
    ...     [written] = books.write(rows, size=2, k=0)
    ...     [drawn] = books.draw(1, k=1, largest=2)
    ...     books.close()
    >>> drawn.id == written.id, drawn.oldest_version
    (True, 0)

    Args:
        out: The run directory. It must be new, unless `state` is given.
        host: The host's name, for ids of its own.
        settings: What to record as the run's configuration.
        experience: An experience log that other runs may write to as well; left out, the run has its own.
        reuse_budget: How often a group is trained on at most, its first use included.
        max_lag: The largest lag of a group that is drawn.
        state: What `state` returned at the checkpoint of `step`, from which the host resumes.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        host: str,
        settings: Mapping[str, Any] | None = None,
        experience: str | os.PathLike[str] | None = None,
        reuse_budget: int = 4,
        max_lag: int | None = None,
        state: Mapping[str, Json] | None = None,
        step: int = 0,
    ) -> None:
        self.directory, self.host = RunDirectory(Path(out)), host
        self._reuse_budget, self._max_lag, self._step = reuse_budget, max_lag, step
        shared = {} if experience is None else {"run": {"experience": log_of(experience)}}
        config = parse({"task": {"name": host}, "model": {"path": host}} | dict(settings or {}) | shared)
        old = self.directory.events.exists()
        if old and (state is None or state["run"] not in (self.directory.name, *dict(self.directory.past))):
            raise RunError(
                f"{out} already holds a run: continue it from {host}'s checkpoint, or choose another directory"
            )
        self._lock = RunLock(self.directory) if old else self.directory.create(config)
        state = state if old else None  # a checkpoint whose run directory is elsewhere begins a new run
        self._own, self._seed = self.directory.own_run(config), config.seed
        self.journal = FileJournal(self.directory.events)
        place = config.run.experience or self.directory.experience
        self.log = ExperienceLog.open(place, writer=f"{host}-{self.run}", own_run=self._own)
        self._number = self.log.size()
        self._refused: set[str] = set()
        self._index, self._counts = Index(), DrawCounts()
        self._cursor: Snapshot | None = None
        self._published: int | None = None
        if state is not None:
            uses, groups = cast("list[list[int]]", state["uses"]), cast(int, state["groups"])
            self._counts = DrawCounts.from_runs(groups, uses)
        self._feed()
        if state is not None:
            self._rewind(step, config)

    @property
    def run(self) -> str:
        """The id of the run."""
        return self._own.id

    def _feed(self) -> None:
        rows, self._cursor = self.log.index_since(self._cursor)
        self._index.feed(rows)
        self._counts.grow(len(self._index))

    def _rewind(self, step: int, config: Config) -> None:
        gone = np.flatnonzero(self._index.columns.oldest_version > step)
        self._counts.close(gone)
        by, why = self._own.trainer, f"{len(gone)} groups are of versions after the checkpoint"
        events = [LedgerEvent("", LedgerEventKind.REWOUND, step, by=by)]
        superseded = self.log.read(gone) if len(gone) else []
        events += [LedgerEvent(one.id, LedgerEventKind.SUPERSEDED, step, "resumed before it", by) for one in superseded]
        self.log.record(events)
        self.journal.write(EventKind.RESUMED, step, why=why)
        before, now = self.directory.config().model_dump(), config.model_dump()
        if changed := [name for name in now if before[name] != now[name] and name != "steps"]:
            self.journal.write(EventKind.CHANGED, step, what=f"settings of {self.host}: {', '.join(changed)}")

    def write(self, rows: Sequence[HostRow], *, size: int, k: int) -> list[Group]:
        """Append rows as groups of `size` that step k trains on, durably. What validation refuses is in quarantine."""
        groups = groups_of(rows, size, prefix=self._own.prefix, task=self.host, first=self._number)
        self._number += len(groups)
        accepted = self.log.append(groups).accepted
        self._refused |= {group.id for group in groups} - set(accepted)
        self._feed()
        self._counts.mark(self.log.find(accepted), k, self._reuse_budget)
        return groups

    def draw(
        self, count: int, *, k: int, largest: int, known: bool = False, multiple: int = 1, vocabulary: int | None = None
    ) -> list[Group]:
        """Draw up to `count` groups of at most `largest` completions.

        Groups are drawn as in `sampler.mode = "replay"`: by the spread of their rewards, less often the older they are
        and the more often they were drawn. Groups with invalid behavior log-probs, and with `known` those without, are
        left out for good. Their number is a multiple of `multiple`. A token that is not below `vocabulary` is an error.
        """
        self._feed()
        columns, uses = self._index.columns, self._counts.uses
        lags = np.where(columns.oldest_version == NO_VERSION, 0, k - columns.oldest_version)
        past = columns.ripe & (uses != CLOSED) & (columns.reward_std > EQUAL_REWARDS)
        past &= (columns.completions <= largest) & (lags >= 0)
        if self._max_lag is not None:
            past &= lags <= self._max_lag
        none = np.zeros(len(columns), np.bool_)
        chosen = Candidates(k, count, self._seed, columns, uses, none, past, none).sample_past(count)
        groups = self.log.read(chosen) if chosen else []
        for group in groups:
            rows = (group.prompt.token_ids, *(one.token_ids for one in group.completions))
            if any(len(outside_vocabulary(row, vocabulary)) for row in rows):
                raise LogReadError(
                    f"group {group.id} of {self.log.tables.groups.uri} has tokens beyond the model's vocabulary of "
                    f"{vocabulary}: another model's tokenizer wrote this log; name one of the same tokenizer"
                )
        given = [[one.behavior_logprobs for one in group.completions] for group in groups]
        useless = [any(known if x is UNKNOWN else invalid_logprobs(x).any() for x in one) for one in given]
        self._counts.close(np.array(chosen, np.int64)[useless])
        chosen = [one for one, without in zip(chosen, useless, strict=True) if not without]
        groups = [one for one, without in zip(groups, useless, strict=True) if not without]
        whole = len(chosen) // multiple * multiple
        self._counts.mark(np.array(chosen[:whole], np.int64), k, self._reuse_budget)
        return groups[:whole]

    def trained(
        self,
        groups: Sequence[Group],
        found: StepFigures | None,
        metrics: Mapping[str, float],
        *,
        step: int,
        version: int | None = None,
        replayed: Set[str] = frozenset(),
        updates: int = 1,
    ) -> None:
        """Record a step: its groups, how far the policy had drifted from each, and its figures for the report."""
        drift = [None] * len(groups) if found is None else found.groups
        self.log.record(
            LedgerEvent(
                group.id, LedgerEventKind.TRAINED, step, by=self._own.trainer, updates=updates,
                drift=None if one is None else one.tv, ess=None if one is None else one.ess,
            )
            for group, one in zip(groups, drift, strict=True)
            if group.id not in self._refused
        )  # fmt: skip
        if version is not None and version != self._published:
            self._published = version
            self.journal.write(EventKind.PUBLISHED, version, version=version, why=self.host, how=self.host, bytes=0)
        lags = [step - 1 - group.oldest_version for group in groups if group.oldest_version is not None]
        by_lag = {} if found is None else {name: dict(one) for name, one in found.by_lag.items()}
        self.journal.write(
            EventKind.STEP, step, metrics=dict(metrics), by_lag=cast(Json, by_lag), lags=cast(Json, lags),
            groups=len(groups), replayed=len(replayed), retired={},
            rewards=rewards_by_version(group for group in groups if group.id not in replayed),
        )  # fmt: skip
        self._step = step

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint of the host keeps."""
        return {"run": self.run, "uses": cast(Json, self._counts.runs(since=0)), "groups": len(self._index)}

    def close(self, finished: bool = True) -> None:
        """Wait until everything is on disk, and release the run directory."""
        why = "" if finished else f"{self.host} ended before its last step"
        ledger = str(self.log.ledger())
        with self.journal:
            self.journal.write(EventKind.ENDED, self._step, why=why, finished=finished, ledger=ledger, seconds={})
        self.log.close()
        self._lock.release()


def log_of(place: str | os.PathLike[str]) -> str:
    """Return the experience log at a place: of a run directory, its own.

    >>> log_of("s3://bucket/log")
    's3://bucket/log'
    """
    own = RunDirectory(Path(place)).experience
    return os.fspath(own if own.is_dir() else place)
