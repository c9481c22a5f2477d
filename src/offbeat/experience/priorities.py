"""Which past groups are worth another look: weights, and a weighted draw without replacement.

Random numbers are a hash of a key and the group's ordinal, not a stream: nothing is carried from draw to draw, and
what one group gets does not depend on how many others there are.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_STD: Final = 1e-3
"""Groups without contrast weigh as if their rewards differed by this little: rarely drawn, never impossible."""


@dataclass(frozen=True)
class Priority:
    """The weight of a past group: std^advantage · exp(−recency·lag − reuse·uses − difficulty·mean reward).

    Zero switches a term off; all zero draws uniformly. A group one step further behind is drawn exp(−recency) times
    as often, one use more counts exp(−reuse), and a positive difficulty prefers prompts that are rarely solved. A
    group without a version of ours has no lag, so recency leaves it alone.

    >>> weights = np.exp(Priority(recency=0.1, reuse=0.0).log_weights(
    ...     lag=np.array([0, 10]), uses=np.array([1, 1]), reward_mean=np.array([0.5, 0.5]),
    ...     reward_std=np.array([0.5, 0.5])))
    >>> weights.round(3).tolist()
    [0.5, 0.184]
    """

    recency: float = 0.1
    reuse: float = 1.0
    advantage: float = 1.0
    difficulty: float = 0.0

    def log_weights(
        self,
        lag: NDArray[np.integer],
        uses: NDArray[np.integer],
        reward_mean: NDArray[np.floating],
        reward_std: NDArray[np.floating],
    ) -> NDArray[np.float64]:
        """Logarithms, so that no group's weight vanishes however far behind it is."""
        contrast = np.log(np.maximum(reward_std.astype(np.float64), LEAST_STD))
        discount = self.recency * lag + self.reuse * uses + self.difficulty * reward_mean.astype(np.float64)
        return np.asarray(self.advantage * contrast - discount, dtype=np.float64)


def uniforms(key: int, ordinals: NDArray[np.integer]) -> NDArray[np.float64]:
    """A number in (0, 1) for each ordinal under `key`, by the finaliser of SplitMix64.

    >>> uniforms(7, np.array([0, 1, 2])).round(4).tolist()
    [0.3898, 0.0168, 0.9008]
    """
    x = ordinals.astype(np.uint64) + np.uint64(1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.asarray((x >> np.uint64(11)) + 0.5, dtype=np.float64) * 2.0**-53


def shuffled(key: int, count: int) -> NDArray[np.int64]:
    """The ordinals 0 … count − 1 in the order of their random numbers.

    >>> shuffled(7, 5).tolist()
    [1, 0, 4, 3, 2]
    """
    return np.argsort(uniforms(key, np.arange(count)), kind="stable")


def weighted_draw(
    key: int, ordinals: NDArray[np.int64], log_weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """`count` of `ordinals` without replacement, each next one with chance proportional to its weight.

    The largest of log w + Gumbel noise come first, which is the same as drawing one after another
    (Efraimidis and Spirakis, 2006).

    >>> weighted_draw(7, np.array([4, 8, 9]), np.log([1.0, 1e9, 1e-9]), 2).tolist()
    [8, 4]
    """
    scores = log_weights - np.log(-np.log(uniforms(key, ordinals)))
    best = np.arange(len(ordinals))
    if 0 < count < len(ordinals):
        best = np.argpartition(-scores, count)[:count]
    order: NDArray[np.int64] = best[np.argsort(-scores[best], kind="stable")][:count]
    return ordinals[order]
