"""An experience log in memory, for tests and simulation: the same validation, ledger and snapshots, without a disk."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.feedback import LateScore, merge
from offbeat.experience.index import NO_VERSION, Columns, prompt_key
from offbeat.experience.ledger import Ledger, LedgerEvent, settle
from offbeat.experience.log import Receipt
from offbeat.experience.quarantine import QuarantineEntry, refused
from offbeat.experience.rows import reward_figures
from offbeat.experience.schema import Snapshot, digest
from offbeat.experience.validation import ValidationRules, validate_group
from offbeat.types import Group, Score, Unscorable


class MemoryLog:
    """A log with the methods of `ExperienceLog` that the loop and the workers call. An ordinal is an index of a list.

    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(1.0))
    >>> log = MemoryLog()
    >>> log.append([Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))]).accepted
    ('g7',)
    >>> log.index_since(None)[0].reward_mean.tolist(), str(log.ledger())[:11]
    ([1.0], '1 generated')
    """

    def __init__(self, rules: ValidationRules | None = None) -> None:
        self._rules = rules or ValidationRules()
        self._groups: list[Group] = []
        self._places: dict[str, int] = {}
        self._late: list[LateScore] = []
        self._events: list[LedgerEvent] = []
        self._refused: list[QuarantineEntry] = []
        self._repeated = self._conflicts = 0

    def submit(self, groups: Iterable[Group]) -> "Future[Receipt]":
        done: Future[Receipt] = Future()
        done.set_result(self.append(groups))
        return done

    def append(self, groups: Iterable[Group]) -> Receipt:
        accepted, repeated, turned_away = [], [], []
        for group in groups:
            if (refusal := validate_group(group, self._rules)) is not None:
                turned_away.append(refused(group, refusal))
            elif group.id in self._places:
                self._repeated += 1
                self._conflicts += digest(group) != digest(self._groups[self._places[group.id]])
                repeated.append(group.id)
            else:
                self._places[group.id] = len(self._groups)
                self._groups.append(group)
                accepted.append(group.id)
        self._refused += turned_away
        return Receipt(tuple(accepted), tuple(repeated), tuple(turned_away))

    def score(self, scores: Iterable[LateScore]) -> None:
        """Append late scores. Their groups must be in the log."""
        self._late += scores

    def record(self, events: Iterable[LedgerEvent]) -> None:
        self._events += events

    def snapshot(self) -> Snapshot:
        return Snapshot(len(self._groups), len(self._late), len(self._events), len(self._refused))

    def find(self, group_ids: Sequence[str]) -> NDArray[np.int64]:
        return np.array([self._places.get(one, -1) for one in group_ids], np.int64)

    def read(self, which: Sequence[int] | Sequence[str]) -> list[Group]:
        return [self._group(self._places[one] if isinstance(one, str) else int(one)) for one in which]

    def groups(self) -> Iterator[Group]:
        return (self._group(place) for place in range(len(self._groups)))

    def _group(self, place: int, scores: int | None = None) -> Group:
        group = self._groups[place]
        late: dict[str, Score | Unscorable] = {
            one.completion_id: one.score for one in self._late[:scores] if one.group_id == group.id
        }
        return merge(group, late) if late else group

    def index_since(self, cursor: Snapshot | None, until: Snapshot | None = None) -> tuple[Columns, Snapshot]:
        since, now = cursor or Snapshot(), until or self.snapshot()
        changed = {self._places[one.group_id] for one in self._late[since.scores : now.scores]}
        places = [*sorted(place for place in changed if place < since.groups), *range(since.groups, now.groups)]
        groups = [self._group(place, now.scores) for place in places]
        figures = [reward_figures([one.score for one in group.completions]) for group in groups]
        columns: dict[str, Any] = {
            "ordinal": places,
            "oldest_version": [NO_VERSION if g.oldest_version is None else g.oldest_version for g in groups],
            "task": [0] * len(groups),
            "sources": [1] * len(groups),
            "ripe": [group.scored for group in groups],
            "completions": [len(group.completions) for group in groups],
            "scored": [scored for scored, _, _ in figures],
            "reward_mean": [mean or 0.0 for _, mean, _ in figures],
            "reward_std": [std or 0.0 for _, _, std in figures],
            "tokens": [sum(len(one.token_ids) for one in group.completions) for group in groups],
            "prompt": [prompt_key(group.prompt.task, group.prompt.id) for group in groups],
        }
        return Columns(**columns), now

    def ledger(self) -> Ledger:
        away = ((entry.group_id, entry.refusal.reason.value) for entry in self._refused)
        return settle(self._places, self._events, away, repeated=self._repeated, conflicts=self._conflicts)
