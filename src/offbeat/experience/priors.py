"""What earlier groups say about each prompt: discounted counts of right and wrong answers, for shrunk advantages.

Every group that is drawn for the first time adds its results to its prompt. A result of the version k - n counts
0.5^(n/halflife) at step k. Only drawn groups count, and never a group for itself, so a prior is a function of the
draws before it: it does not depend on what else is in the log already, and is the same after a resume.
"""

from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.types import Json

STRENGTH: Final = 2.0
"""Answers that the mean over all prompts counts for: as many as a uniform prior."""

HALFLIFE: Final = 50.0
"""Steps after which an earlier result counts half, if the configuration does not say."""

Prior = tuple[float, float]
"""Right and wrong answers."""


@dataclass
class Tally:
    """Discounted right and wrong answers as of step k."""

    right: float = 0.0
    wrong: float = 0.0
    k: int = 0

    def at(self, k: int, decay: float) -> Prior:
        """Return both counts as of step k."""
        factor = decay ** (k - self.k)
        return self.right * factor, self.wrong * factor


@dataclass
class PromptPriors:
    """The tallies of all prompts and of each one.

    >>> priors = PromptPriors(halflife=10)
    >>> rows = Columns([0, 1], [0, 10], [0, 0], [1, 1], [True] * 2, [4, 4], [4, 4], [0.75, 0.0], [0.4, 0.0], [9, 9],
    ...                prompt=[7, 7])
    >>> priors.draw(0, rows, np.array([0]), np.array([True]))   # nothing is known yet: one right, one wrong
    [(1.0, 1.0)]
    >>> [round(count, 3) for count in priors.draw(10, rows, np.array([1]), np.array([True]))[0]]   # 3 and 1, halved
    [2.75, 1.25]
    """

    halflife: float
    everything: Tally = field(default_factory=Tally)
    by_prompt: dict[int, Tally] = field(default_factory=dict)

    @property
    def _decay(self) -> float:
        return float(0.5 ** (1 / self.halflife))

    def draw(self, k: int, rows: Columns, ordinals: NDArray[np.int64], first: NDArray[np.bool_]) -> list[Prior]:
        """Return the prior of each drawn group, then count the groups that are drawn for the first time."""
        results = [self._result(k, rows, ordinal) for ordinal in ordinals.tolist()]
        keys = rows.prompt[ordinals].tolist()
        found = [
            self._prior(k, key, (0.0, 0.0) if new else own)
            for key, own, new in zip(keys, results, first.tolist(), strict=True)
        ]
        for key, own, new in zip(keys, results, first.tolist(), strict=True):
            if new:
                for tally in (self.everything, self.by_prompt.setdefault(key, Tally())):
                    right, wrong = tally.at(k, self._decay)
                    tally.right, tally.wrong, tally.k = right + own[0], wrong + own[1], k
        return found

    def _result(self, k: int, rows: Columns, ordinal: int) -> Prior:
        """Return a group's own right and wrong answers, discounted; nothing for answers of other models."""
        version, scored = int(rows.oldest_version[ordinal]), int(rows.scored[ordinal])
        if version == NO_VERSION:
            return 0.0, 0.0
        right = min(max(float(rows.reward_mean[ordinal]), 0.0), 1.0) * scored
        factor = self._decay ** max(k - version, 0)
        return right * factor, (scored - right) * factor

    def _prior(self, k: int, key: int, own: Prior) -> Prior:
        """Return a prompt's results plus the mean of all prompts with the weight `STRENGTH`, both without `own`."""
        all_right, all_wrong = _without(self.everything.at(k, self._decay), own)
        right, wrong = _without(self.by_prompt.get(key, Tally()).at(k, self._decay), own)
        mean = (all_right + 1) / (all_right + all_wrong + 2)
        return STRENGTH * mean + right, STRENGTH * (1 - mean) + wrong

    def state(self) -> Json:
        """Return the tallies as JSON, for the checkpoint."""
        tallies = {"": self.everything} | {str(key): tally for key, tally in self.by_prompt.items()}
        return {key: [tally.right, tally.wrong, tally.k] for key, tally in tallies.items()}

    def restore(self, state: Json) -> None:
        tallies = {key: Tally(*values) for key, values in cast(dict[str, list[int]], state).items()}
        self.everything = tallies.pop("")
        self.by_prompt = {int(key): tally for key, tally in tallies.items()}


def _without(total: Prior, own: Prior) -> Prior:
    return max(total[0] - own[0], 0.0), max(total[1] - own[1], 0.0)
