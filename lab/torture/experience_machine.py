"""A rule-based state machine over the whole experience log.

Groups arrive, repeat, conflict, get late scores, are drawn and dropped, and are drawn again after a crash. The machine
keeps its own record of what it did, in dictionaries. After every step, the ledger of the log must agree with it.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, cast

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.experience.feedback import Deadline, LateScore, Overdue
from offbeat.experience.index import CLOSED
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits, Waiting
from offbeat.experience.schema import Snapshot
from offbeat.types import UNKNOWN, Completion, Group, Json, Prompt, Score, Unscorable, VersionSpan

MODES: tuple[Mode, ...] = (
    Fresh(),
    Replay(share=1.0, reuse_budget=2),
    Replay(share=0.5, reuse_budget=3, cooldown=2),
    Offline(epochs=2, cooldown=1),
)
SCORES: tuple[Score | Unscorable | None, ...] = (Score(0.0), Score(1.0), Unscorable("timeout"), None)


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer saves together with its weights."""

    k: int
    snapshot: Snapshot
    state: str


class ExperienceMachine(RuleBasedStateMachine):
    """Log, sampler and ledger against the machine's own record."""

    steps: ClassVar[int] = 0
    """Rules run, over all examples."""
    draws: ClassVar[int] = 0
    """Batches drawn, over all examples."""
    place: Path | None = None

    @initialize(mode=st.sampled_from(MODES), max_lag=st.sampled_from([None, 1, 3]), strict=st.booleans())
    def open(self, mode: Mode, max_lag: int | None, strict: bool) -> None:
        """Open an empty log with two writers and a sampler."""
        self.place = Path(tempfile.mkdtemp(prefix="experience-machine-"))
        self.log, self.other = self.open_log("one"), self.open_log("two")
        self.mode, self.limits = mode, SamplerLimits(batch=2, max_lag=max_lag, drop_zero_variance=strict)
        self.groups: dict[str, Group] = {}
        self.appended: dict[str, Group] = {}  # as appended, without late scores
        self.generating: dict[str, bool] = {}  # id → still expected
        self.refused: set[str] = set()
        self.overdue: set[str] = set()
        self.repeated = self.conflicts = self.born = self.k = 0
        self.trained: list[tuple[str, int]] = []  # id, step
        self.dropped: list[tuple[str, str, int]] = []  # id, cause, step
        self.since_checkpoint: list[tuple[int, Snapshot, Draw | Waiting]] = []
        self.sampler = Sampler(self.mode, self.limits, seed=1)
        self.fed = Snapshot()
        self.checkpoint = Checkpoint(0, Snapshot(), json.dumps(self.sampler.state()))

    def teardown(self) -> None:
        """Close the log and remove it."""
        if self.place is not None:  # an example may end before `open`
            self.log.close()
            self.other.close()
            shutil.rmtree(self.place)

    def open_log(self, writer: str) -> ExperienceLog:
        assert self.place is not None
        return ExperienceLog.open(self.place, writer=writer)

    def new_id(self) -> str:
        self.born += 1
        return f"g{self.born}"

    @rule()
    def begin(self) -> None:
        """A worker starts a group."""
        group_id = self.new_id()
        self.log.record([LedgerEvent(group_id, LedgerEventKind.STARTED, by="worker")])
        self.generating[group_id] = True

    @precondition(lambda self: any(self.generating.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A worker dies while it generates its group."""
        group_id = data.draw(st.sampled_from([name for name, expected in self.generating.items() if expected]))
        self.log.record([LedgerEvent(group_id, LedgerEventKind.UNFINISHED, by="supervisor")])
        self.generating[group_id] = False

    @rule(
        behind=st.integers(0, 4),
        ours=st.integers(0, 4),
        scores=st.lists(st.sampled_from(SCORES), min_size=1, max_size=3),
        count=st.integers(1, 3),
        data=st.data(),
    )
    def append(
        self, behind: int, ours: int, scores: list[Score | Unscorable | None], count: int, data: st.DataObject
    ) -> None:
        """Groups arrive, started here or from elsewhere (`ours` = 0), scored or waiting for feedback."""
        expected = [name for name, still in self.generating.items() if still]
        first = data.draw(st.sampled_from([self.new_id(), *expected]))
        names = [first, *(self.new_id() for _ in range(count - 1))]
        groups = [a_group(name, max(self.k - behind, 0) if ours else None, scores) for name in names]
        assert self.log.append(groups).accepted == tuple(names)
        self.take_in(groups)
        for name in names:
            self.generating.pop(name, None)

    @rule(behind=st.integers(0, 2), ours=st.booleans(), count=st.integers(2, 8))
    def append_rollouts(self, behind: int, ours: bool, count: int) -> None:
        """Append several groups at once, scored and with contrast: the usual case."""
        version = max(self.k - behind, 0) if ours else None
        groups = [a_group(self.new_id(), version, [Score(0.0), Score(1.0)]) for _ in range(count)]
        assert len(self.log.append(groups).accepted) == count
        self.take_in(groups)

    @rule(broken=st.sampled_from([float("nan"), float("inf")]))
    def append_nonsense(self, broken: float) -> None:
        """Append a group that validation must refuse and one that it must accept."""
        bad, good = a_group(self.new_id(), 0, [Score(broken), Score(1.0)]), a_group(self.new_id(), 0, [Score(0.5)] * 2)
        receipt = self.log.append([bad, good])
        assert receipt.accepted == (good.id,) and [r.group_id for r in receipt.refused] == [bad.id]
        self.refused.add(bad.id)
        self.take_in([good])

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), same=st.booleans())
    def repeat(self, data: st.DataObject, same: bool) -> None:
        """Another writer appends a group again: the same one, or another one with the same id."""
        group = self.appended[data.draw(st.sampled_from(sorted(self.appended)))]
        again = group if same else replace(group, prompt=replace(group.prompt, id=f"another {self.new_id()}"))
        with self.open_log("three, new") as writer:
            assert writer.append([again]).accepted == (group.id,)
        self.repeated += 1
        self.conflicts += not same

    @precondition(lambda self: self.unripe())
    @rule(data=st.data(), score=st.sampled_from(SCORES[:3]), whole=st.booleans())
    def score_late(self, data: st.DataObject, score: Score | Unscorable, whole: bool) -> None:
        """Feedback arrives from another process, for one completion or for all."""
        group = data.draw(st.sampled_from(self.unripe()))
        open_ = [c.id for c in group.completions if c.score is None]
        late = [LateScore(group.id, name, score) for name in (open_ if whole else open_[:1])]
        assert not self.other.score(late).refused
        self.know({late.completion_id: score for late in late}, group)

    @rule(then=st.sampled_from(list(Overdue)))
    def pass_deadline(self, then: Overdue) -> None:
        """The deadline passes for every group that still waits for feedback."""
        waiting = [group for group in self.unripe() if group.id not in self.overdue]
        deadline = Deadline(1.0, then)
        assert sorted(self.log.give_up(deadline, now=2e10)) == sorted(group.id for group in waiting)
        for group in waiting:
            if then is Overdue.DROP:
                self.overdue.add(group.id)
            else:
                self.know({c.id: deadline.missing() for c in group.completions if c.score is None}, group)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        """The trainer reads new groups, draws, trains, and records the fate of the groups."""
        for _ in range(times):
            rows, self.fed = self.log.index_since(self.fed)
            self.sampler.feed(rows)
            found = self.sampler.draw(self.k)
            self.settle(found, self.fed)
            if isinstance(found, Waiting):
                self.check_shortage(found)
                break

    @rule(steps=st.integers(1, 4))
    def skip(self, steps: int) -> None:
        """The trainer makes steps on other data, so that waiting groups lag further behind."""
        self.k += steps

    @rule()
    def save(self) -> None:
        """The trainer writes a checkpoint."""
        self.checkpoint = Checkpoint(self.k, self.fed, json.dumps(self.sampler.state()))
        self.since_checkpoint = []

    @rule(repeat_history=st.booleans())
    def crash(self, repeat_history: bool) -> None:
        """The trainer dies and resumes. From the same snapshots it must draw the same batches again."""
        self.log.close()
        self.log = self.open_log("one")
        back = self.checkpoint
        self.sampler, self.k = Sampler(self.mode, self.limits, seed=1), back.k
        rows, self.fed = self.log.index_since(None, back.snapshot)
        self.sampler.feed(rows)
        state: dict[str, Json] = json.loads(back.state)
        self.sampler.restore(state)
        self.log.record([LedgerEvent("", LedgerEventKind.REWOUND, step=self.k)])
        self.trained = [entry for entry in self.trained if entry[1] <= self.k]
        self.dropped = [entry for entry in self.dropped if entry[2] <= self.k]
        history, self.since_checkpoint = self.since_checkpoint, []
        for k, until, expected in history if repeat_history else []:
            rows, self.fed = self.log.index_since(self.fed, until)
            self.sampler.feed(rows)
            self.k = k
            assert self.sampler.draw(k) == expected
            self.settle(expected, until)

    @rule(rows=st.sampled_from([4, 1024]))
    def compact(self, rows: int) -> None:
        """Compaction runs."""
        self.other.tables.groups.compact(rows)
        self.other.tables.scores.compact(rows)
        self.other.tables.events.compact(rows)

    def settle(self, found: Draw | Waiting, now: Snapshot) -> None:
        """Check the draw against the limits. Record it in the ledger and in the machine's own record."""
        self.since_checkpoint.append((self.k, now, found))
        lost = [(group.id, drop.cause) for group, drop in zip(self.read(found, "dropped"), found.dropped, strict=True)]
        self.log.record(LedgerEvent(name, LedgerEventKind(cause), step=self.k, cause="lag") for name, cause in lost)
        self.dropped += [(name, cause, self.k) for name, cause in lost]
        if isinstance(found, Waiting):
            assert 0 < found.needed <= self.limits.batch
            return
        for group, lag in zip(self.read(found, "ordinals"), found.lags, strict=True):
            assert group.scored and group.id not in self.overdue
            # An offline run has no publishes of its own, so versions in its log say nothing about lag.
            version = None if isinstance(self.mode, Offline) else group.oldest_version
            assert lag == (None if version is None or version > self.k else self.k - version)
            uses = [step for name, step in self.trained if name == group.id]
            # The lag limit is for groups that were never drawn.
            assert uses or lag is None or self.limits.max_lag is None or lag <= self.limits.max_lag
            assert self.mode.reuse_budget is None or len(uses) < self.mode.reuse_budget
            assert not uses or self.k + 1 - max(uses) > self.mode.cooldown
            self.trained.append((group.id, self.k + 1))
            self.log.record([LedgerEvent(group.id, LedgerEventKind.TRAINED, step=self.k + 1)])
        self.k += 1
        type(self).draws += 1

    def check_shortage(self, found: Waiting) -> None:
        """Check that a sampler of fresh groups waits only for groups that are really missing.

        Replay and epochs have other reasons to wait. After a crash, the log may hold groups of versions that the
        trainer has not reached again: they do not count yet.
        """
        waiting = [g for g in self.groups.values() if g.scored and self.fate(g.id) is Fate.WAITING]
        ready = [g for g in waiting if g.oldest_version is None or g.oldest_version <= self.k]
        if isinstance(self.mode, Fresh):
            assert len(ready) == self.limits.batch - found.needed

    def read(self, found: Draw | Waiting, which: str) -> list[Group]:
        """Read the groups of a draw from the log. They must be as appended, with late scores merged."""
        ordinals = [drop.ordinal for drop in found.dropped] if which == "dropped" else getattr(found, which)
        groups = self.log.read(np.array(ordinals, np.int64))
        assert [self.groups[group.id] for group in groups] == groups
        return groups

    def take_in(self, groups: list[Group]) -> None:
        self.groups |= {group.id: group for group in groups}
        self.appended |= {group.id: group for group in groups}

    def unripe(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.scored]

    def know(self, scores: dict[str, Score | Unscorable], group: Group) -> None:
        completions = (replace(c, score=scores.get(c.id, c.score)) for c in group.completions)
        self.groups[group.id] = replace(group, completions=tuple(completions))

    def fate(self, group_id: str) -> Fate:
        if any(name == group_id for name, _ in self.trained):
            return Fate.TRAINED
        causes = [cause for name, cause, _ in self.dropped if name == group_id]
        if causes:
            return Fate(causes[-1])
        return Fate.EXPIRED if group_id in self.overdue else Fate.WAITING

    @invariant()
    def ledger_agrees(self) -> None:
        """Every group has exactly the fate that the machine recorded, and no group is missing."""
        if self.place is None:  # before `open`
            return
        type(self).steps += 1
        ledger = self.log.ledger()
        ledger.check()
        expected = {name: self.fate(name) for name in self.groups}
        expected |= dict.fromkeys(self.refused, Fate.QUARANTINED)
        expected |= {name: Fate.IN_FLIGHT if going else Fate.UNFINISHED for name, going in self.generating.items()}
        assert {name: entry.fate for name, entry in ledger.fates.items()} == expected
        assert (ledger.repeated, ledger.conflicts) == (self.repeated, self.conflicts)
        assert ledger.uses == len(self.trained)

    @invariant()
    def nothing_is_out_of_reach(self) -> None:
        """The sampler can still draw every group that the ledger calls waiting: it has closed only other groups."""
        if self.place is None:
            return
        runs = cast(list[list[int]], self.sampler.state()["runs"])
        closed = [first + i for first, count, uses, _ in runs if uses == CLOSED for i in range(count)]
        groups = self.log.read(np.array(closed, np.int64), self.fed)
        assert all(self.fate(group.id) is not Fate.WAITING for group in groups)


def a_group(name: str, version: int | None, scores: list[Score | Unscorable | None]) -> Group:
    """Return a small group with these scores. Without a version it comes from another system."""
    spans = () if version is None else (VersionSpan(version, 0, 2),)
    logprobs = UNKNOWN if version is None else np.array([-0.5, -1.5], np.float32)
    source = "policy" if spans else "human"
    completions = tuple(
        Completion(f"{name}/{i}", np.array([i, 7], np.int32), logprobs, spans, source=source, score=score)
        for i, score in enumerate(scores)
    )
    return Group(name, Prompt(f"prompt of {name}", np.array([1, 2], np.int32), "arithmetic"), completions)
