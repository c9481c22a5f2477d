"""The experience log: append groups, score them late, read them back as of any snapshot.

    with ExperienceLog.open("runs/one/experience", rules=ValidationRules(vocab_size=49152)) as log:
        receipt = log.append(groups)              # blocks until they are on disk; refused ones are in quarantine
        log.score([LateScore("g7", "g7/2", Score(1.0))])
        rows, now = log.index_since(None)         # what a sampler is fed, and from where to go on
        batch = log.read(ordinals, now)

Four tables under one URI, a local path or an object store's: `groups`, `scores`, `events`, `quarantine` (`schema.py`).
Any number of processes append and read at the same time. Acknowledged means committed and forced to disk (`table.py`).

Once each. A group is called by its id. Of several rows with one id the first in commit order counts and readers leave
the others out, so an append that was not acknowledged is simply repeated. A writer knows what it wrote lately and does
not write it twice; a repetition with other content is refused where the writer knows, and counted as a conflict in the
ledger where only a reader can see it.
"""

import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from offbeat.experience.commits import Committer, after_all, wait
from offbeat.experience.feedback import Deadline, LateScore, Overdue
from offbeat.experience.lance_table import Table
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.quarantine import QuarantineEntry, Refusal, RefusalReason, quarantine_rows, refused
from offbeat.experience.reader import LogReader
from offbeat.experience.rows import group_rows
from offbeat.experience.schema import EVENTS, SCORES, Tables, digest, score_fields
from offbeat.experience.validation import ValidationRules, group_named_by, validate_group, validate_late_score
from offbeat.types import Group

REMEMBERED: Final = 65_536
"""Group ids a writer remembers having appended."""


@dataclass(frozen=True)
class Receipt:
    """What became of the things handed in. Whoever holds a receipt knows that all it says is on disk.

    >>> Receipt(accepted=("g7", "g8")).refused
    ()
    """

    accepted: tuple[str, ...] = ()
    """Ids of what was appended."""
    repeated: tuple[str, ...] = ()
    """Ids that this writer had appended before, with the same content."""
    refused: tuple[QuarantineEntry, ...] = ()
    """In quarantine, each with its reason."""


class ExperienceLog(LogReader):
    """One log, open for reading and writing. Safe to use from many threads; after a fork, open it anew."""

    def __init__(self, tables: Tables, rules: ValidationRules, writer: str) -> None:
        super().__init__(tables)
        self._rules = rules
        self._writer = writer
        self._recent: OrderedDict[str, tuple[str, Future[None]]] = OrderedDict()
        self._remembering = threading.Lock()
        self._groups_in = _committer(tables.groups)
        self._scores_in = _committer(tables.scores)
        self._events_in = _committer(tables.events)
        self._quarantine_in = _committer(tables.quarantine)

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        rules: ValidationRules | None = None,
        writer: str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> "ExperienceLog":
        """Open the log at a path or URI; where there is none it is created.

        >>> import tempfile
        >>> from offbeat.types import UNKNOWN, Completion, Prompt, Score
        >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(1.0))
        >>> group = Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     receipt = log.append([group])
        ...     receipt.accepted, log.read(["g7"]) == [group]
        (('g7',), True)

        Args:
            uri: A local path, or what Lance takes: `s3://`, `gs://`, `az://`, `memory://` (gone when it is closed).
            rules: What the door asks beyond what holds for every run.
            writer: Who is writing; stands in every row. Host and process id unless given.
            storage_options: Keys and endpoints of an object store, handed to Lance as they are.
        """
        name = writer or f"{socket.gethostname()}-{os.getpid()}"
        return cls(Tables.open(os.fspath(uri), storage_options), rules or ValidationRules(), name)

    def append(self, groups: Iterable[Group]) -> Receipt:
        """Append groups and wait until they are on disk. One that is refused does not keep out the others."""
        return wait(self.submit(groups))

    def submit(self, groups: Iterable[Group]) -> "Future[Receipt]":
        """Append groups without waiting. What is submitted while a commit runs goes into the next one together."""
        sorted_ = _Sorted()
        try:
            for group in groups:
                self._admit(group, sorted_)
            waiting = list(sorted_.earlier)
            if sorted_.admitted:
                waiting.append(self._commit(sorted_))
        except BaseException as error:  # whoever waits for one of these ids must not wait for ever
            self._forget(sorted_, error)
            raise
        if sorted_.refused:
            waiting.append(self._quarantine_in.submit(self._refusals(sorted_.refused)))
        ids = tuple(group.id for group in sorted_.admitted)
        return after_all(waiting, Receipt(ids, tuple(sorted_.repeated), tuple(sorted_.refused)))

    def _admit(self, group: Group, sorted_: "_Sorted") -> None:
        refusal = validate_group(group, self._rules)
        if refusal is None:
            content = digest(group)
            with self._remembering:
                known = self._recent.setdefault(group.id, (content, sorted_.committed))
                if len(self._recent) > REMEMBERED:
                    self._recent.popitem(last=False)
            if known[1] is sorted_.committed and group.id not in sorted_.ids:
                sorted_.admit(group, content)
                return
            if known[0] == content:
                sorted_.repeated.append(group.id)
                sorted_.earlier.append(known[1])
                return
            refusal = Refusal(RefusalReason.CONFLICT, f"group {group.id} was appended before, with other content")
        sorted_.refused.append(refused(group, refusal))

    def _commit(self, sorted_: "_Sorted") -> Future[None]:
        def settle(done: Future[None]) -> None:
            if (error := done.exception()) is None:
                sorted_.committed.set_result(None)
            else:
                self._forget(sorted_, error)

        rows = group_rows(sorted_.admitted, sorted_.digests, appended_at=time.time(), writer=self._writer)
        self._groups_in.submit(rows).add_done_callback(settle)
        return sorted_.committed

    def _forget(self, sorted_: "_Sorted", error: BaseException) -> None:
        """What was not acknowledged may be appended again."""
        with self._remembering:
            for group_id in sorted_.ids:
                self._recent.pop(group_id, None)
        sorted_.committed.set_exception(error)

    def _refusals(self, entries: Sequence[QuarantineEntry]) -> pa.Table:
        return quarantine_rows(entries, at=time.time(), writer=self._writer)

    def quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Keep what could not even be made a group of, and wait until it is on disk."""
        if entries:
            wait(self._quarantine_in.submit(self._refusals(entries)))

    def score(self, scores: Iterable[LateScore]) -> Receipt:
        """Append late feedback and wait until it is on disk. The groups it speaks of must be in the log.

        >>> import tempfile
        >>> from offbeat.types import Score
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     log.score([LateScore("g7", "g7/2", Score(1.0))]).refused[0].refusal.detail
        "there is no group 'g7' in this log; append the group first"
        """
        given = list(scores)
        known = self._known([group_named_by(late) for late in given])
        admitted: list[LateScore] = []
        turned_away: list[QuarantineEntry] = []
        for late, about in zip(given, known, strict=True):
            refusal = validate_late_score(late, about, self._rules)
            if refusal is None:
                admitted.append(late)
            else:
                turned_away.append(refused(late, refusal, kind="score"))
        waiting = []
        if admitted:
            waiting.append(self._scores_in.submit(_score_rows(admitted, time.time())))
        if turned_away:
            waiting.append(self._quarantine_in.submit(self._refusals(turned_away)))
        ids = tuple(late.completion_id for late in admitted)
        return wait(after_all(waiting, Receipt(ids, refused=tuple(turned_away))))

    def record(self, events: Iterable[LedgerEvent]) -> None:
        """Append events to the ledger and wait until they are on disk.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     log.record([LedgerEvent("g8", LedgerEventKind.STARTED, by="worker 3")])
        ...     print(log.ledger())
        1 generated = 0 trained + 0 waiting + 0 dropped (none) + 1 in flight
        """
        given = list(events)
        if not given:
            return
        columns = {name: [getattr(event, name) for event in given] for name in ("group_id", "step", "cause", "by")}
        columns |= {"event": [event.event.value for event in given], "at": [time.time()] * len(given)}
        wait(self._events_in.submit(pa.table(columns, schema=EVENTS)))

    def give_up(self, deadline: Deadline, now: float) -> list[str]:
        """Apply a feedback deadline at the time `now` (unix seconds); returns the ids of the groups concerned.

        The decision is written down like any other fact, so it is the same for every reader and after every resume.
        """
        late = self.unripe(appended_before=now - deadline.seconds)
        if deadline.then is Overdue.DROP:
            self.record(
                LedgerEvent(group.id, LedgerEventKind.EXPIRED, cause="feedback", by=self._writer) for group in late
            )
        else:
            self.score(
                LateScore(group.id, completion.id, deadline.missing(), scorer="deadline")
                for group in late
                for completion in group.completions
                if completion.score is None
            )
        return [group.id for group in late]

    def close(self) -> None:
        """Commit what is queued, then close."""
        for committer in (self._groups_in, self._scores_in, self._events_in, self._quarantine_in):
            committer.close()

    def __enter__(self) -> "ExperienceLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Sorted:
    """The groups of one submission, by what becomes of them."""

    def __init__(self) -> None:
        self.admitted: list[Group] = []
        self.ids: set[str] = set()
        self.digests: list[str] = []
        self.repeated: list[str] = []
        self.refused: list[QuarantineEntry] = []
        self.earlier: list[Future[None]] = []
        self.committed: Future[None] = Future()

    def admit(self, group: Group, content: str) -> None:
        self.admitted.append(group)
        self.ids.add(group.id)
        self.digests.append(content)


def _committer(table: Table) -> Committer[pa.Table]:
    return Committer(lambda batch: table.append(pa.concat_tables(batch)), table.uri)


def _score_rows(scores: Sequence[LateScore], at: float) -> pa.Table:
    fields = [score_fields(late.score) for late in scores]
    columns = {
        "group_id": [late.group_id for late in scores],
        "completion_id": [late.completion_id for late in scores],
        "scored_at": [at] * len(scores),
        "scorer": [late.scorer for late in scores],
    }
    columns |= {
        name: list(values)
        for name, values in zip(("reward", "unscorable", "detail", "breakdown"), zip(*fields, strict=True), strict=True)
    }
    return pa.table(columns, schema=SCORES)
