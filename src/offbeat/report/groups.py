"""The groups of a run, for people: what was asked and answered, what it earned, and what became of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.config import Config
from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.lance_table import exists
from offbeat.experience.ledger import Fate, GroupFate, Ledger
from offbeat.experience.reader import LogReader
from offbeat.objective.spec import Advantage, Objective
from offbeat.run.directory import RunDirectory
from offbeat.seeds import derive
from offbeat.types import Completion, Group, Json, Score, Unscorable

Decoder = Callable[[Sequence[int]], str]
NO_CONTRAST: Final = 1e-6
"""Rewards of a group that spread less than this are the same."""


@dataclass(frozen=True)
class Answer:
    """One completion."""

    text: str
    reward: float | None
    score: str
    """In words: the reward and its parts, or why there is none."""
    advantage: float | None
    """None where it takes no part in the loss."""
    tokens: int
    finish: str
    author: str
    """The versions that wrote it, or its source."""


@dataclass(frozen=True)
class Shown:
    """One group."""

    id: str
    task: str
    prompt: str
    columns: Mapping[str, Json]
    fate: str
    version: int | None
    lags: tuple[int, ...]
    """One for each time it was trained on."""
    answers: tuple[Answer, ...]

    @property
    def lag(self) -> str:
        """In words."""
        return ", ".join(map(str, self.lags)) if self.lags else "–"


@dataclass(frozen=True)
class Wanted:
    """Which groups to look at; each range holds both its ends.

    >>> Wanted(reward=(0.5, 1.0)).reward
    (0.5, 1.0)
    """

    fate: str | None = None
    reward: tuple[float, float] | None = None
    """Mean of the group."""
    lag: tuple[float, float] | None = None
    """Of one of the times it was trained on."""
    length: tuple[float, float] | None = None
    """Tokens of the longest completion."""


class RunGroups:
    """The groups of one run, its books, and its objective's view of them."""

    def __init__(self, reader: LogReader, objective: Objective, seed: int, decode: Decoder) -> None:
        self._reader, self._seed, self._decode = reader, seed, decode
        # Who draws shrunk advantages gives the trainer a prior that no log holds: the centred ones are shown.
        shrunk = objective.advantage is Advantage.SHRUNK
        self._objective = replace(objective, advantage=Advantage.CENTRED) if shrunk else objective
        self.snapshot = reader.snapshot()
        self.columns: Columns = reader.index_since(None, self.snapshot)[0]
        self.ledger: Ledger = reader.ledger(self.snapshot)
        self.ids = self._in_order()

    @classmethod
    def of(cls, directory: RunDirectory, config: Config) -> "RunGroups | None":
        """Of a run directory; None where it has no experience log yet."""
        place = config.run.experience or str(directory.experience)
        if not exists(f"{place.rstrip('/')}/groups.lance"):
            return None
        return cls(LogReader.open(place), config.objective.resolve(), config.seed, decoder(directory.tokenizer))

    def _in_order(self) -> list[str]:
        """Ids of the groups that are in the log, by ordinal; the ledger also knows others."""
        names = list(self.ledger.fates)
        places = self._reader.find(names, self.snapshot).tolist() if names else []
        return [name for place, name in sorted(zip(places, names, strict=True)) if place >= 0]

    def __len__(self) -> int:
        return len(self.ids)

    def lags(self, ordinal: int) -> tuple[int, ...]:
        """Of each time the group was trained on."""
        version = int(self.columns.oldest_version[ordinal])
        steps = self.ledger.fates[self.ids[ordinal]].steps
        return () if version == NO_VERSION else tuple(step - 1 - version for step in steps if step > version)

    def choose(self, wanted: Wanted) -> list[int]:
        """Ordinals of the groups that fit, in the order of the log."""
        fits = np.ones(len(self), np.bool_)
        if wanted.reward is not None:
            mean = self.columns.reward_mean
            low, high = wanted.reward
            fits &= (self.columns.scored > 0) & (mean >= low - 1e-6) & (mean <= high + 1e-6)
        chosen: list[int] = fits.nonzero()[0].tolist()
        if wanted.fate is not None:
            chosen = [n for n in chosen if self.ledger.fates[self.ids[n]].fate == wanted.fate]
        if wanted.lag is not None:
            low, high = wanted.lag
            chosen = [n for n in chosen if any(low <= lag <= high for lag in self.lags(n))]
        return chosen if wanted.length is None else self._of_length(chosen, *wanted.length)

    def _of_length(self, chosen: list[int], low: float, high: float) -> list[int]:
        found = []
        for start in range(0, len(chosen), 256):
            some = chosen[start : start + 256]
            for ordinal, group in zip(some, self._reader.read(some, self.snapshot), strict=True):
                if low <= max((len(one.token_ids) for one in group.completions), default=0) <= high:
                    found.append(ordinal)
        return found

    def sample(self) -> list[int]:
        """A few to begin with: trained ones from the beginning, the middle and the end, and one of every other fate."""
        by_fate: dict[Fate, list[int]] = {}
        for ordinal, name in enumerate(self.ids):
            by_fate.setdefault(self.ledger.fates[name].fate, []).append(ordinal)
        trained = by_fate.pop(Fate.TRAINED, [])
        with_contrast = [n for n in trained if self.columns.reward_std[n] > NO_CONTRAST] or trained
        chosen = [with_contrast[place] for place in (0, len(with_contrast) // 2, -1)] if with_contrast else []
        return list(dict.fromkeys([*chosen, *(ordinals[-1] for ordinals in by_fate.values())]))

    def show(self, ordinals: Sequence[int]) -> list[Shown]:
        """The groups, to be read."""
        groups = self._reader.read(ordinals, self.snapshot) if len(ordinals) else []
        return [self._shown(ordinal, group) for ordinal, group in zip(ordinals, groups, strict=True)]

    def _shown(self, ordinal: int, group: Group) -> Shown:
        advantages = self._advantages(group)
        return Shown(
            id=group.id,
            task=group.prompt.task,
            prompt=self._decode(group.prompt.token_ids.tolist()),
            columns=group.prompt.columns,
            fate=fate_in_words(self.ledger.fates[group.id]),
            version=group.oldest_version,
            lags=self.lags(ordinal),
            answers=tuple(
                Answer(
                    self._decode(one.token_ids.tolist()),
                    one.score.reward if isinstance(one.score, Score) else None,
                    _score_in_words(one.score),
                    advantage,
                    len(one.token_ids),
                    str(one.finish),
                    _author(one),
                )
                for one, advantage in zip(group.completions, advantages, strict=True)
            ),
        )

    def _advantages(self, group: Group) -> list[float | None]:
        """As the trainer's objective gives them."""
        import torch

        from offbeat.objective.credit import assign_credit

        scores = [one.score for one in group.completions]
        rewards = torch.tensor([[s.reward if isinstance(s, Score) else 0.0 for s in scores]], dtype=torch.float64)
        scored = torch.tensor([[isinstance(s, Score) for s in scores]])
        lengths = torch.tensor([[int(one.loss_mask.sum()) for one in group.completions]])
        seeds = [derive(self._seed, "red-drop", group.id)]
        credit = assign_credit(self._objective, rewards, scored, lengths, group_seeds=seeds)
        pairs = zip(credit.advantages_BG[0].tolist(), credit.trained_BG[0].tolist(), strict=True)
        return [advantage if trained else None for advantage, trained in pairs]


@dataclass(frozen=True)
class Contrast:
    """Shares of groups over the log, part by part in the order of appending."""

    ends: Sequence[int]
    """Groups appended by the end of each part."""
    all_pass: Sequence[float]
    mixed: Sequence[float]
    all_fail: Sequence[float]


def contrast(columns: Columns, parts: int = 40) -> Contrast:
    """All-pass (one reward for all, at least 1), mixed, and all-fail (one reward for all, below 1).

    >>> same, means, spread = [4] * 3, [1, 0.5, 0], [0, 0.5, 0]
    >>> rows = Columns([0, 1, 2], same, same, same, [True] * 3, same, same, means, spread, same)
    >>> found = contrast(rows, parts=1)
    >>> found.ends, [round(share[0], 2) for share in (found.all_pass, found.mixed, found.all_fail)]
    ([3], [0.33, 0.33, 0.33])
    """
    rows = np.flatnonzero(columns.scored > 0)
    mixed = columns.reward_std[rows] > NO_CONTRAST
    passed = ~mixed & (columns.reward_mean[rows] >= 1 - NO_CONTRAST)
    pieces = np.array_split(np.arange(len(rows)), min(parts, len(rows))) if len(rows) else []

    def shares(which: NDArray[np.bool_]) -> list[float]:
        return [float(which[piece].mean()) for piece in pieces]

    ends = [int(rows[piece[-1]]) + 1 for piece in pieces]
    return Contrast(ends, shares(passed), shares(mixed), shares(~mixed & ~passed))


def decoder(tokenizer: Path) -> Decoder:
    """Token ids to text by the tokenizer that the run left; without one, the ids themselves."""
    file = tokenizer / "tokenizer.json"
    if not file.exists():
        return lambda ids: "tokens " + " ".join(map(str, ids))
    from tokenizers import Tokenizer

    loaded: Tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))


def fate_in_words(fate: GroupFate) -> str:
    """What became of a group, and when or why.

    >>> fate_in_words(GroupFate(Fate.TRAINED, (3, 9))), fate_in_words(GroupFate(Fate.EXPIRED, cause="lag"))
    ('trained at steps 3, 9', 'expired (lag)')
    """
    steps = f" at step{'s' * (len(fate.steps) > 1)} {', '.join(map(str, fate.steps))}" if fate.steps else ""
    return f"{fate.fate.value}{steps}" + (f" ({fate.cause})" if fate.cause else "")


def _score_in_words(score: Score | Unscorable | None) -> str:
    match score:
        case Score(reward, breakdown):
            parts = ", ".join(f"{name} {part:g}" for name, part in breakdown.items()) if len(breakdown) > 1 else ""
            return f"{reward:g}" + (f" ({parts})" if parts else "")
        case Unscorable(reason, detail):
            return f"unscorable: {reason} {detail}".rstrip()
    return "feedback awaited"


def _author(completion: Completion) -> str:
    versions = ", ".join(f"v{span.version}" for span in completion.versions)
    return versions if completion.source == "policy" and versions else " ".join([completion.source, versions]).strip()
