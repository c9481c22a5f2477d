"""The groups of a run as text: prompt, completions, rewards, advantages, and the fate of each group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.config import Config
from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.lance_table import exists
from offbeat.experience.ledger import Fate, GroupFate, Ledger
from offbeat.experience.reader import LogReader
from offbeat.objective.spec import Advantage, Objective
from offbeat.run.directory import RunDirectory
from offbeat.seeds import derive
from offbeat.types import Completion, Finish, Group, Json, Score, Unscorable

Decoder = Callable[[Sequence[int]], str]
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
    """One for each time it was trained on."""
    completions: tuple[CompletionView, ...]

    @property
    def lag(self) -> str:
        return ", ".join(map(str, self.lags)) if self.lags else "–"


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


class RunGroups:
    """The groups in a run's experience log, with the ledger and the advantages under the run's objective."""

    def __init__(self, reader: LogReader, objective: Objective, seed: int, decode: Decoder) -> None:
        self._reader, self._seed, self._decode = reader, seed, decode
        self._objective = objective
        self.snapshot = reader.snapshot()
        self.columns: Columns = reader.index_since(None, self.snapshot)[0]
        self.ledger: Ledger = reader.ledger(self.snapshot)
        self.ids = self._ids_in_log_order()

    @classmethod
    def open(cls, directory: RunDirectory, config: Config) -> "RunGroups | None":
        """Open the experience log of a run, or return None if it does not exist yet."""
        uri = config.run.experience or str(directory.experience)
        if not exists(f"{uri.rstrip('/')}/groups.lance"):
            return None
        return cls(LogReader.open(uri), config.objective.resolve(), config.seed, decoder(directory.tokenizer))

    def _ids_in_log_order(self) -> list[str]:
        """Return the ids of groups in the log, by ordinal. The ledger also has groups that never reached the log."""
        ids = list(self.ledger.fates)
        ordinals = self._reader.find(ids, self.snapshot).tolist() if ids else []
        return [group_id for ordinal, group_id in sorted(zip(ordinals, ids, strict=True)) if ordinal >= 0]

    def __len__(self) -> int:
        return len(self.ids)

    def lags(self, ordinal: int) -> tuple[int, ...]:
        """Return the lag at each time the group was trained on."""
        version = int(self.columns.oldest_version[ordinal])
        steps = self.ledger.fates[self.ids[ordinal]].steps
        return () if version == NO_VERSION else tuple(step - 1 - version for step in steps if step > version)

    def select(self, wanted: GroupFilter) -> list[int]:
        """Return the ordinals of matching groups, in log order."""
        matches = np.ones(len(self), np.bool_)
        if wanted.reward is not None:
            mean = self.columns.reward_mean
            low, high = wanted.reward
            matches &= (self.columns.scored > 0) & (mean >= low - 1e-6) & (mean <= high + 1e-6)
        chosen: list[int] = matches.nonzero()[0].tolist()
        if wanted.fate is not None:
            chosen = [n for n in chosen if self.ledger.fates[self.ids[n]].fate == wanted.fate]
        if wanted.lag is not None:
            low, high = wanted.lag
            chosen = [n for n in chosen if any(low <= lag <= high for lag in self.lags(n))]
        return chosen if wanted.length is None else self._select_length(chosen, *wanted.length)

    def _select_length(self, chosen: list[int], low: float, high: float) -> list[int]:
        found = []
        for start in range(0, len(chosen), 256):
            chunk = chosen[start : start + 256]
            for ordinal, group in zip(chunk, self._reader.read(chunk, self.snapshot), strict=True):
                if low <= max((len(one.token_ids) for one in group.completions), default=0) <= high:
                    found.append(ordinal)
        return found

    def sample(self) -> list[int]:
        """Choose the first, middle and last trained group, with contrast if possible, and one group per other fate."""
        by_fate: dict[Fate, list[int]] = {}
        for ordinal, group_id in enumerate(self.ids):
            by_fate.setdefault(self.ledger.fates[group_id].fate, []).append(ordinal)
        trained = by_fate.pop(Fate.TRAINED, [])
        with_contrast = [n for n in trained if self.columns.reward_std[n] > NO_CONTRAST] or trained
        chosen = [with_contrast[place] for place in (0, len(with_contrast) // 2, -1)] if with_contrast else []
        return list(dict.fromkeys([*chosen, *(ordinals[-1] for ordinals in by_fate.values())]))

    def load(self, ordinals: Sequence[int]) -> list[GroupView]:
        """Read these groups from the log and decode them."""
        groups = self._reader.read(ordinals, self.snapshot) if len(ordinals) else []
        return [self._view(ordinal, group) for ordinal, group in zip(ordinals, groups, strict=True)]

    def _view(self, ordinal: int, group: Group) -> GroupView:
        return GroupView(
            id=group.id,
            task=group.prompt.task,
            prompt=self._decode(group.prompt.token_ids.tolist()),
            columns=group.prompt.columns,
            fate=describe_fate(self.ledger.fates[group.id]),
            version=group.oldest_version,
            lags=self.lags(ordinal),
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

        Shrunk advantages depend on the history at the step that drew the group, which the log does not keep.
        """
        if self._objective.advantage is Advantage.SHRUNK:
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


def decoder(tokenizer: Path) -> Decoder:
    """Return a function from token ids to text; without a tokenizer file it prints the ids."""
    file = tokenizer / "tokenizer.json"
    if not file.exists():
        return lambda ids: "tokens " + " ".join(map(str, ids))
    from tokenizers import Tokenizer

    loaded: Tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))


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
            return f"{reward:g}" + (f" ({parts})" if parts else "")
        case Unscorable(reason, detail):
            return f"unscorable: {reason} {detail}".rstrip()
    return "waiting for feedback"


def _author(completion: Completion) -> str:
    versions = ", ".join(f"v{span.version}" for span in completion.versions)
    return versions if completion.source == "policy" and versions else " ".join([completion.source, versions]).strip()
