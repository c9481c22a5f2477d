"""The experience log: append groups, add late scores, read groups back as of any snapshot.

    with ExperienceLog.open("runs/one/experience", rules=ValidationRules(vocab_size=49152)) as log:
        receipt = log.append(groups)              # blocks until they are on disk; refused ones are in quarantine
        log.score([LateScore("g7", "g7/2", Score(1.0))])
        rows, now = log.index_since(None)         # what to feed a sampler, and the cursor for the next call
        batch = log.read(ordinals, now)

A log is four tables under one URI, a local path or an object store: `groups`, `scores`, `events`, `quarantine`
(`schema.py`). Any number of processes append and read at the same time. Acknowledged means committed and forced to disk
(`lance_table.py`).

Each group counts once. A group is identified by its id. If several rows have the same id, the first in commit order
counts and readers skip the others, so an append that was not acknowledged can simply be repeated. A writer remembers
what it appended recently and does not write it twice. A repeated id with different content is refused if the writer
remembers the id; otherwise readers find it and the ledger counts it as a conflict.
"""

import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from offbeat.experience.background import Committer, after_all, wait
from offbeat.experience.feedback import Deadline, LateScore, Overdue
from offbeat.experience.lance_table import Table
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, OwnRun
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import EVENTS, SCORES, Tables, digest, group_rows, score_fields, seal_rows
from offbeat.experience.score_join import FeedbackTally, ScoreJoin
from offbeat.experience.validation import (
    QuarantineEntry,
    Refusal,
    RefusalReason,
    ValidationRules,
    group_named_by,
    quarantine_rows,
    refused,
    validate_group,
    validate_late_score,
)
from offbeat.types import Group

REMEMBERED: Final = 8_192
"""Group ids that a writer remembers having appended."""


@dataclass(frozen=True)
class Receipt:
    """The acknowledgement of an append: what was accepted, repeated or refused, all of it on disk."""

    accepted: tuple[str, ...] = ()
    """Ids of the appended groups, or of the scored completions."""
    repeated: tuple[str, ...] = ()
    """Ids of groups that this writer had appended before, with the same content."""
    refused: tuple[QuarantineEntry, ...] = ()
    """What validation refused. It is in quarantine, each entry with its reason."""


class ExperienceLog(LogReader):
    """A log that is open for reading and writing. Safe to use from many threads. Open it again after a fork."""

    def __init__(self, tables: Tables, rules: ValidationRules, writer: str, own_run: OwnRun | None = None) -> None:
        super().__init__(tables, own_run)
        self._rules = rules
        self._writer = writer
        self._recent: OrderedDict[str, tuple[str, Future[None]]] = OrderedDict()
        self._remembering = threading.Lock()
        committers = tuple(map(_committer, (tables.groups, tables.scores, tables.events, tables.quarantine)))
        self._group_committer, self._score_committer, self._event_committer, self._quarantine_committer = committers
        self._committers = committers

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        rules: ValidationRules | None = None,
        writer: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        own_run: OwnRun | None = None,
    ) -> "ExperienceLog":
        """Open the log at a path or URI, and create it if it does not exist.

        >>> import tempfile
        >>> from offbeat.types import UNKNOWN, Completion, Prompt, Score
        >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(1.0))
        >>> group = Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     receipt = log.append([group])
        ...     receipt.accepted, log.read(["g7"]) == [group]
        (('g7',), True)

        Args:
            uri: A local path, or a URI that Lance accepts: `s3://`, `gs://`, `az://`.
            rules: What validation checks in addition to the rules that hold for every run.
            writer: Name of the writer, stored in every row. The default is host name and process id.
            storage_options: Keys and endpoints of an object store, passed to Lance unchanged.
            own_run: The run that reads and writes here. Versions and events that are written are marked as its own, and
                versions of other runs are not read.
        """
        name = writer or f"{socket.gethostname()}-{os.getpid()}"
        return cls(Tables.open(os.fspath(uri), storage_options), rules or ValidationRules(), name, own_run)

    def append(self, groups: Iterable[Group]) -> Receipt:
        """Append groups and wait until they are on disk. A refused group does not affect the others."""
        return wait(self.submit(groups))

    def submit(self, groups: Iterable[Group]) -> "Future[Receipt]":
        """Append groups without waiting. Groups submitted while a commit runs are written together in the next one."""
        submission = _Submission()
        try:
            for group in groups:
                self._validate(group, submission)
            waiting = list(submission.earlier_commits)
            if submission.accepted:
                waiting.append(self._commit(submission))
        except BaseException as error:  # otherwise a caller that waits for one of these ids would wait forever
            self._forget(submission, error)
            raise
        if submission.refused:
            waiting.append(self._submit_refusals(submission.refused))
        ids = tuple(group.id for group in submission.accepted)
        return after_all(waiting, Receipt(ids, tuple(submission.repeated), tuple(submission.refused)))

    def _validate(self, group: Group, submission: "_Submission") -> None:
        """Add a group to the accepted, the repeated or the refused ones."""
        refusal = validate_group(group, self._rules)
        if refusal is None:
            content = digest(group)
            with self._remembering:
                known_content, commit = self._recent.setdefault(group.id, (content, submission.committed))
                if len(self._recent) > REMEMBERED:
                    self._recent.popitem(last=False)
            if commit is submission.committed and group.id not in submission.ids:
                submission.accept(group, content)
                return
            if known_content == content:
                submission.repeated.append(group.id)
                submission.earlier_commits.append(commit)
                return
            refusal = Refusal(RefusalReason.CONFLICT, f"group {group.id} was appended before with different content")
        submission.refused.append(refused(group, refusal))

    @property
    def _run_id(self) -> str | None:
        return None if self.own_run is None else self.own_run.id

    def _commit(self, submission: "_Submission") -> Future[None]:
        def finish(done: Future[None]) -> None:
            if (error := done.exception()) is None:
                submission.committed.set_result(None)
            else:
                self._forget(submission, error)

        rows = group_rows(
            submission.accepted, submission.digests, appended_at=time.time(), writer=self._writer, run=self._run_id
        )
        self._group_committer.submit(rows).add_done_callback(finish)
        return submission.committed

    def _forget(self, submission: "_Submission", error: BaseException) -> None:
        """Allow groups that were not acknowledged to be appended again."""
        with self._remembering:
            for group_id in submission.ids:
                self._recent.pop(group_id, None)
        submission.committed.set_exception(error)

    def _submit_refusals(self, entries: Sequence[QuarantineEntry]) -> Future[None]:
        return self._quarantine_committer.submit(quarantine_rows(entries, at=time.time(), writer=self._writer))

    def quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Store refusals from outside the log's own validation, and wait until they are on disk."""
        if entries:
            wait(self._submit_refusals(entries))

    def score(self, scores: Iterable[LateScore]) -> Receipt:
        """Append late feedback and wait until it is on disk. The groups must already be in the log.

        >>> import tempfile
        >>> from offbeat.types import Score
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     log.score([LateScore("g7", "g7/2", Score(1.0))]).refused[0].refusal.detail
        "there is no group 'g7' in this log; append the group first"
        """
        given = list(scores)
        known = self._tasks_and_completions([group_named_by(late) for late in given])
        accepted: list[LateScore] = []
        refusals: list[QuarantineEntry] = []
        for late, task_and_completions in zip(given, known, strict=True):
            refusal = validate_late_score(late, task_and_completions, self._rules)
            if refusal is None:
                accepted.append(late)
            else:
                refusals.append(refused(late, refusal, kind="score"))
        waiting = []
        if accepted:
            waiting.append(self._score_committer.submit(_score_rows(accepted, time.time())))
        if refusals:
            waiting.append(self._submit_refusals(refusals))
        ids = tuple(late.completion_id for late in accepted)
        return wait(after_all(waiting, Receipt(ids, refused=tuple(refusals))))

    def feedback(self, rows: Iterable[Mapping[str, object]], *, replace: bool = False) -> FeedbackTally:
        """Append late feedback given as plain rows, joined by your own ids, and say what became of each row.

        A row names a completion, with its group if several groups have one of that name, and its score. A score that
        the log has counts as known; another one is refused, unless `replace` is True. See `score_join.py`.

        >>> import tempfile
        >>> from offbeat.types import UNKNOWN, Completion, Prompt
        >>> answer = Completion("a17", [4, 2], UNKNOWN, source="human")
        >>> group = Group("ticket-81", Prompt(id="p", token_ids=[1], task="support"), (answer,))
        >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
        ...     _ = log.append([group])
        ...     waiting = [one.completion.id for one in log.pending()]
        ...     tally = log.feedback([{"answer_id": "a17", "score": 1.0}, {"answer_id": "a18", "score": 1.0}])
        >>> waiting, tally.new, tally.examples["unknown-completion"]
        (['a17'], 1, ["row 2: there is no completion 'a18' in this log"])
        """
        return ScoreJoin(replace=replace, rules=self._rules).run_rows(self, rows)

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
        names = ("group_id", "step", "cause", "by", "drift", "ess", "updates")
        columns = {name: [getattr(event, name) for event in given] for name in names}
        columns |= {"event": [event.event.value for event in given], "at": [time.time()] * len(given)}
        columns["run"] = [event.run or self._run_id for event in given]
        wait(self._event_committer.submit(pa.table(columns, schema=EVENTS)))

    def give_up(self, deadline: Deadline, now: float) -> list[str]:
        """Apply a feedback deadline at the time `now` (unix seconds). Return the ids of the groups that are overdue.

        The decision is written into the log, so it is the same for every reader and after every resume.
        """
        overdue = list(self.unripe(appended_before=now - deadline.seconds))
        if deadline.then is Overdue.DROP:
            self.record(
                LedgerEvent(group.id, LedgerEventKind.EXPIRED, cause="feedback", by=self._writer) for group in overdue
            )
        else:
            self.score(
                LateScore(group.id, completion.id, deadline.missing(), scorer="deadline")
                for group in overdue
                for completion in group.completions
                if completion.score is None
            )
        return [group.id for group in overdue]

    def close(self) -> None:
        """Commit what is queued, then close."""
        for committer in self._committers:
            committer.close()

    def __enter__(self) -> "ExperienceLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Submission:
    """The groups of one call of `submit`, sorted by the result of validation."""

    def __init__(self) -> None:
        self.accepted: list[Group] = []
        self.ids: set[str] = set()
        self.digests: list[str] = []
        self.repeated: list[str] = []
        self.refused: list[QuarantineEntry] = []
        self.earlier_commits: list[Future[None]] = []
        self.committed: Future[None] = Future()

    def accept(self, group: Group, content: str) -> None:
        self.accepted.append(group)
        self.ids.add(group.id)
        self.digests.append(content)


def _committer(table: Table) -> Committer[pa.Table]:
    """Return what commits sealed rows. After a commit that failed, and may be on disk, a new chain begins."""
    chain, number = "", 0

    def commit(batch: Sequence[pa.Table]) -> None:
        nonlocal chain, number
        chain, before, number, rows = "", chain or secrets.token_hex(4), number if chain else 0, pa.concat_tables(batch)
        table.append(seal_rows(rows, before, number))
        chain, number = before, number + rows.num_rows

    return Committer(commit, table.uri)


def _score_rows(scores: Sequence[LateScore], at: float) -> pa.Table:
    columns = {name: [getattr(late, name) for late in scores] for name in ("group_id", "completion_id", "scorer")}
    fields = zip(*(score_fields(late.score) for late in scores), strict=True)
    columns |= dict(zip(("reward", "unscorable", "detail", "breakdown"), map(list, fields), strict=True))
    return pa.table(columns | {"scored_at": [at] * len(scores)}, schema=SCORES)
