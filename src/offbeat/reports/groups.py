"""The groups of a run as text: prompt, completions, rewards, advantages, and the fate of each group."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.config import Config
from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.lance_table import exists
from offbeat.experience.ledger import Fate, GroupFate, Ledger, LedgerScope
from offbeat.experience.reader import LogReader
from offbeat.objective.spec import Advantage, Objective
from offbeat.run.directory import RunDirectory
from offbeat.run.sinks.samples import Decoder, decoder
from offbeat.seeds import derive
from offbeat.types import Completion, Finish, Group, Json, Score, Unscorable

Range = tuple[float, float]
NO_CONTRAST: Final = 1e-6
"""Rewards of a group with a smaller standard deviation count as equal."""


@dataclass(frozen=True)
class CompletionView:
    """One completion, ready to print."""

    text: str
    score: str
    """The reward and its parts, or why there is no reward."""
    advantage: float | None
    """None if the completion is not part of the loss."""
    tokens: int
    finish: str
    author: str
    """The versions that generated it, or its source."""


@dataclass(frozen=True)
class GroupView:
    """One group, ready to print."""

    id: str
    task: str
    prompt: str
    columns: Mapping[str, Json]
    fate: str
    version: int | None
    lags: tuple[int, ...]
    """One for each time it was trained on; empty if unknown."""
    completions: tuple[CompletionView, ...]
    trained: bool = True

    @property
    def lag(self) -> str:
        return ", ".join(map(str, self.lags)) or ("unknown" if self.trained else "–")


@dataclass(frozen=True)
class GroupFilter:
    """Which groups to show. A range includes both ends."""

    fate: str | None = None
    reward: Range | None = None
    """Mean reward of the group."""
    lag: Range | None = None
    """Lag of at least one of the times it was trained on."""
    length: Range | None = None
    """Tokens of the longest completion."""
    ids: tuple[str, ...] = ()
    task: str | None = None
    version: Range | None = None
    """Oldest version of its completions; groups without a version match no range."""
    step: Range | None = None
    """At least one of the steps at which it was trained on."""
    text: str | None = None
    """Part of the prompt, of a column or of a completion, in any case."""


class RunGroups:
    """The groups in a run's experience log, with the ledger and the advantages under the run's objective."""

    def __init__(
        self, reader: LogReader, objective: Objective, seed: int, decode: Decoder, scope: LedgerScope | None = None
    ) -> None:
        self._reader, self._seed, self._decode = reader, seed, decode
        self._objective, self._scope = objective, scope
        self.snapshot = reader.snapshot()
        self.ledger: Ledger = reader.ledger(self.snapshot, scope)
        self._ordinals, self.ids = self._in_log_order()
        rows = reader.index_since(None, self.snapshot)[0]
        self.others = len(rows) - len(self.ids)
        """Groups in the log that belong to other runs, or to none and were not used by this one."""
        self.columns: Columns = rows.take(self._ordinals)

    @classmethod
    def open(cls, directory: RunDirectory, config: Config) -> "RunGroups | None":
        """Open the experience log of a run, or return None if it does not exist yet."""
        uri = config.run.experience or str(directory.experience)
        if not exists(f"{uri.rstrip('/')}/groups.lance"):
            return None
        # Without its id, only a run in a shared log cannot tell its groups from others.
        own_run = directory.own_run(config) if config.run.experience or directory.is_named else None
        reader = LogReader.open(uri, own_run=own_run)
        decode, scope = decoder(directory.tokenizer), scope_of(directory, config)
        return cls(reader, config.objective.resolve(), config.seed, decode, scope)

    def _in_log_order(self) -> tuple[list[int], list[str]]:
        """Return ordinals and ids of the groups. The ledger also has groups that never reached the log."""
        ids = list(self.ledger.fates)
        ordinals = self._reader.find(ids, self.snapshot).tolist() if ids else []
        found = sorted((ordinal, one) for ordinal, one in zip(ordinals, ids, strict=True) if ordinal >= 0)
        return [ordinal for ordinal, _ in found], [one for _, one in found]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tasks(self) -> list[str]:
        """The tasks of the groups in the log."""
        return self._reader.tasks

    def lags(self, place: int) -> tuple[int, ...]:
        """Return the lag at each time the group was trained on; empty if its version is unknown or of another run."""
        version = int(self.columns.oldest_version[place])
        steps = self.ledger.fates[self.ids[place]].steps
        foreign = self._scope is not None and not self._scope.owns(self.ids[place])
        return () if foreign or version == NO_VERSION else tuple(step - 1 - version for step in steps if step > version)

    def select(self, wanted: GroupFilter) -> list[int]:
        """Return the places of matching groups in `ids`, in log order."""
        matches = np.ones(len(self), np.bool_)
        if wanted.reward is not None:
            mean = self.columns.reward_mean
            low, high = wanted.reward
            matches &= (self.columns.scored > 0) & (mean >= low - 1e-6) & (mean <= high + 1e-6)
        if wanted.version is not None:
            version, (low, high) = self.columns.oldest_version, wanted.version
            matches &= (version != NO_VERSION) & (version >= low) & (version <= high)
        if wanted.task is not None:
            names = dict(enumerate(self.tasks))
            matches &= np.array([names[number] == wanted.task for number in self.columns.task.tolist()], np.bool_)
        chosen: list[int] = matches.nonzero()[0].tolist()
        if wanted.ids:
            chosen = [n for n in chosen if self.ids[n] in wanted.ids]
        if wanted.step is not None:
            low, high = wanted.step
            chosen = [n for n in chosen if any(low <= s <= high for s in self.ledger.fates[self.ids[n]].steps)]
        if wanted.fate is not None:
            chosen = [n for n in chosen if self.ledger.fates[self.ids[n]].fate == wanted.fate]
        if wanted.lag is not None:
            low, high = wanted.lag
            chosen = [n for n in chosen if any(low <= lag <= high for lag in self.lags(n))]
        return chosen if wanted.length is None and not wanted.text else self._select_content(chosen, wanted)

    def _select_content(self, chosen: list[int], wanted: GroupFilter) -> list[int]:
        """Choose by what only the groups themselves know, which takes reading them."""
        low, high = wanted.length or (-np.inf, np.inf)
        found = []
        for start in range(0, len(chosen), 256):
            chunk = chosen[start : start + 256]
            for place, group in zip(chunk, self.read(chunk), strict=True):
                fits = low <= max((len(one.token_ids) for one in group.completions), default=0) <= high
                if fits and (not wanted.text or self._has_text(group, wanted.text.casefold())):
                    found.append(place)
        return found

    def _has_text(self, group: Group, text: str) -> bool:
        tokens = [group.prompt.token_ids, *(one.token_ids for one in group.completions)]
        texts = [*map(str, group.prompt.columns.values()), *(self._decode(one.tolist()) for one in tokens)]
        return any(text in one.casefold() for one in texts)

    def sample(self) -> list[int]:
        """Choose the first, middle and last trained group, with contrast if possible, a replayed one, and one of each
        other fate."""
        by_fate: dict[Fate, list[int]] = {}
        for place, group_id in enumerate(self.ids):
            by_fate.setdefault(self.ledger.fates[group_id].fate, []).append(place)
        trained = by_fate.pop(Fate.TRAINED, [])
        with_contrast = [n for n in trained if self.columns.reward_std[n] > NO_CONTRAST] or trained
        chosen = [with_contrast[place] for place in (0, len(with_contrast) // 2, -1)] if with_contrast else []
        replayed = [n for n in with_contrast if len(self.ledger.fates[self.ids[n]].steps) > 1][-1:]
        return list(dict.fromkeys([*chosen, *replayed, *(places[-1] for places in by_fate.values())]))

    def prompt_numbers(self, places: Sequence[int]) -> NDArray[np.uint64]:
        """Return a number for each of these groups: equal for prompts of the same tokens, whatever their ids."""
        rows = self._reader.catalog.rows_at(np.array([self._ordinals[one] for one in places], np.int64))
        texts = self._reader.tables.groups.take(rows, ["prompt_token_ids"])["prompt_token_ids"].to_pylist()
        numbers: dict[tuple[int, ...], int] = {}
        return np.array([numbers.setdefault(tuple(one), len(numbers)) for one in texts], np.uint64)

    def read(self, places: Sequence[int]) -> list[Group]:
        """Read these groups from the log."""
        return self._reader.read([self._ordinals[one] for one in places], self.snapshot) if len(places) else []

    def load(self, places: Sequence[int]) -> list[GroupView]:
        """Read these groups from the log and decode them."""
        return [self._view(place, group) for place, group in zip(places, self.read(places), strict=True)]

    def _view(self, place: int, group: Group) -> GroupView:
        return GroupView(
            id=group.id,
            task=group.prompt.task,
            prompt=self._decode(group.prompt.token_ids.tolist()),
            columns=group.prompt.columns,
            fate=describe_fate(self.ledger.fates[group.id]),
            version=group.oldest_version,
            lags=self.lags(place),
            trained=bool(self.ledger.fates[group.id].steps),
            completions=tuple(
                CompletionView(
                    self._decode(one.token_ids.tolist()),
                    describe_score(one.score),
                    advantage,
                    len(one.token_ids),
                    str(one.finish),
                    _author(one),
                )
                for one, advantage in zip(group.completions, self._advantages(group), strict=True)
            ),
        )

    def _advantages(self, group: Group) -> list[float | None]:
        """Return the advantages that the run's objective assigns; None if unknown.

        Shrunk advantages depend on the history at the step that drew the group, which the log does not keep. Those of
        your own function are not computed again: a report runs no code of yours.
        """
        if self._objective.advantage is Advantage.SHRUNK or not isinstance(self._objective.advantage, Advantage):
            return [None] * len(group.completions)
        import torch

        from offbeat.objective.credit import assign_credit

        scores = [one.score for one in group.completions]
        rewards = torch.tensor([[s.reward if isinstance(s, Score) else 0.0 for s in scores]], dtype=torch.float64)
        scored = torch.tensor([[isinstance(s, Score) for s in scores]])
        lengths = torch.tensor([[int(one.loss_mask.sum()) for one in group.completions]])
        seeds = [derive(self._seed, "red-drop", group.id)]
        truncated = torch.tensor([[one.finish is Finish.LENGTH for one in group.completions]])
        credit = assign_credit(self._objective, rewards, scored, lengths, group_seeds=seeds, truncated_BG=truncated)
        pairs = zip(credit.advantages_BG[0].tolist(), credit.trained_BG[0].tolist(), strict=True)
        return [advantage if trained else None for advantage, trained in pairs]


def scope_of(directory: RunDirectory, config: Config) -> LedgerScope:
    """Return which groups of its log belong to a run. `run/build.py` names groups and trainers."""
    if config.run.experience:
        return directory.own_run(config).scope
    return LedgerScope("trainer", lambda group_id: not re.match(r"g [0-9a-f]{8}-", group_id))


def contrast_shares(columns: Columns, parts: int = 40) -> tuple[list[int], list[list[float]]]:
    """Return the shares of all-pass, mixed and all-fail groups in consecutive parts of the log.

    The rewards of an all-pass group are equal and at least 1, those of an all-fail group equal and below 1. The first
    result is the number of groups appended by the end of each part.

    >>> same, means, spread = [4] * 3, [1, 0.5, 0], [0, 0.5, 0]
    >>> rows = Columns([0, 1, 2], same, same, same, [True] * 3, same, same, means, spread, same)
    >>> ends, shares = contrast_shares(rows, parts=1)
    >>> ends, [round(share[0], 2) for share in shares]
    ([3], [0.33, 0.33, 0.33])
    """
    rows = np.flatnonzero(columns.scored > 0)
    mixed = columns.reward_std[rows] > NO_CONTRAST
    passed = ~mixed & (columns.reward_mean[rows] >= 1 - NO_CONTRAST)
    pieces = np.array_split(np.arange(len(rows)), min(parts, len(rows))) if len(rows) else []
    ends = [int(rows[piece[-1]]) + 1 for piece in pieces]
    return ends, [[float(kind[piece].mean()) for piece in pieces] for kind in (passed, mixed, ~mixed & ~passed)]


def describe_fate(fate: GroupFate) -> str:
    """Return a fate with its steps and its cause.

    >>> describe_fate(GroupFate(Fate.TRAINED, (3, 9))), describe_fate(GroupFate(Fate.EXPIRED, cause="lag"))
    ('trained at steps 3, 9', 'expired (lag)')
    """
    steps = f" at step{'s' * (len(fate.steps) > 1)} {', '.join(map(str, fate.steps))}" if fate.steps else ""
    return f"{fate.fate.value}{steps}" + (f" ({fate.cause})" if fate.cause else "")


def describe_score(score: Score | Unscorable | None) -> str:
    """Return the reward with its parts, or why there is none."""
    match score:
        case Score(reward, breakdown):
            parts = ", ".join(f"{name} {part:g}" for name, part in breakdown.items()) if len(breakdown) > 1 else ""
            if fault := score.fault:
                parts = f"the answer's fault: its scoring failed, {fault}"
            return f"{reward:g}" + (f" ({parts})" if parts else "")
        case Unscorable(reason, detail):
            return f"unscorable: {reason} {detail}".rstrip()
    return "waiting for feedback"


def _author(completion: Completion) -> str:
    versions = ", ".join(f"v{span.version}" for span in completion.versions)
    return versions if completion.source == "policy" and versions else " ".join([completion.source, versions]).strip()
