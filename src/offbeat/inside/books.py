"""Rows of a host as groups, written to an experience log with their versions, and drawn from it again.

    host's rows ── rows.groups_of ── Books.write ──► experience log ──► Books.draw ── the host's next batch

The run has an id of its own, so several hosts can share a log; versions of others are data of unknown lag. A host that
resumes at an earlier step gives its state back: groups of versions that it has not reached again are superseded.
"""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from offbeat.experience.index import CLOSED, NO_VERSION, DrawCounts, Index
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, OwnRun
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Candidates
from offbeat.experience.sampler import EQUAL_REWARDS
from offbeat.experience.schema import Snapshot
from offbeat.inside.rows import HostRow, groups_of
from offbeat.types import UNKNOWN, Group, GroupDrift, Json


class Books:
    """The experience log of a run inside a host.

    >>> import tempfile
    >>> rows = [HostRow([1, 2], [5, i], [-0.1, -0.7], float(i == 3), version=0) for i in (3, 4)]
    >>> with tempfile.TemporaryDirectory() as place:
    ...     books = Books(place, host="trl")
    ...     [written] = books.write(rows, size=2, k=0)
    ...     [drawn] = books.draw(1, k=1, largest=2)
    ...     books.close()
    >>> drawn.id == written.id, drawn.oldest_version
    (True, 0)
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        host: str,
        task: str = "",
        seed: int = 0,
        reuse_budget: int = 4,
        max_lag: int | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self._place, self._storage_options = os.fspath(place), storage_options
        self._host, self._task, self._seed = host, task or host, seed
        self._reuse_budget, self._max_lag = reuse_budget, max_lag
        self._open(secrets.token_hex(4))

    def _open(self, run: str) -> None:
        self.run, own = run, OwnRun(run, shared=True)
        writer = f"{self._host}-{run}"
        self.log = ExperienceLog.open(self._place, writer=writer, own_run=own, storage_options=self._storage_options)
        self._own, self._number = own, self.log.size()
        self._index, self._counts = Index(), DrawCounts()
        self._cursor: Snapshot | None = None
        self._feed()

    def _feed(self) -> None:
        rows, self._cursor = self.log.index_since(self._cursor)
        self._index.feed(rows)
        self._counts.grow(len(self._index))

    def write(self, rows: Sequence[HostRow], *, size: int, k: int) -> list[Group]:
        """Append rows as groups of `size` that step k trains on, durably. What validation refuses is in quarantine."""
        groups = groups_of(rows, size, prefix=self._own.prefix, task=self._task, first=self._number)
        self._number += len(groups)
        accepted = self.log.append(groups).accepted
        self._feed()
        self._counts.mark(self.log.find(accepted), k, self._reuse_budget)
        return groups

    def draw(self, count: int, *, k: int, largest: int, known: bool = False, multiple: int = 1) -> list[Group]:
        """Draw up to `count` groups of at most `largest` completions, each at most `reuse_budget` times.

        Groups are drawn as in `sampler.mode = "replay"`: by the spread of their rewards, less often the older they are
        and the more often they were drawn. With `known`, groups without behavior log-probs are left out for good. Their
        number is a multiple of `multiple`.
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
        if known:
            unknown = [any(one.behavior_logprobs is UNKNOWN for one in group.completions) for group in groups]
            self._counts.close(np.array(chosen, np.int64)[unknown])
            chosen = [one for one, without in zip(chosen, unknown, strict=True) if not without]
            groups = [one for one, without in zip(groups, unknown, strict=True) if not without]
        whole = len(chosen) // multiple * multiple
        self._counts.mark(np.array(chosen[:whole], np.int64), k, self._reuse_budget)
        return groups[:whole]

    def trained(self, ids: Iterable[str], drift: Sequence[GroupDrift | None], *, step: int, updates: int) -> None:
        """Record that groups were trained on, with how far the policy had drifted from each."""
        self.log.record(
            LedgerEvent(
                name, LedgerEventKind.TRAINED, step, by=self._own.trainer, updates=updates,
                drift=None if found is None else found.tv, ess=None if found is None else found.ess,
            )
            for name, found in zip(ids, drift, strict=True)
        )  # fmt: skip

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint of the host keeps."""
        return {"run": self.run, "uses": cast(Json, self._counts.runs(since=0)), "groups": len(self._index)}

    def resume(self, state: Mapping[str, Json], *, step: int) -> None:
        """Go on as the run of a checkpoint that was saved at `step`: what it recorded for later steps is cancelled.

        Groups of versions that the run has not reached again are superseded: that policy no longer exists.
        """
        self.log.close()
        self._open(str(state["run"]))
        uses, groups = cast("list[list[int]]", state["uses"]), cast(int, state["groups"])
        self._counts = DrawCounts.from_runs(groups, uses)
        self._counts.grow(len(self._index))
        gone = np.flatnonzero(self._index.columns.oldest_version > step)
        self._counts.close(gone)
        by = self._own.trainer
        events = [LedgerEvent("", LedgerEventKind.REWOUND, step, by=by)]
        events += [
            LedgerEvent(group.id, LedgerEventKind.SUPERSEDED, step, f"the run resumed at step {step}", by)
            for group in (self.log.read(gone) if len(gone) else [])
        ]
        self.log.record(events)

    def close(self) -> None:
        """Wait until everything is on disk, and release the log."""
        self.log.close()
