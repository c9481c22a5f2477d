"""The weight by which a past group is drawn again, and random numbers by key and position."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

LEAST_STD: Final = 1e-3
"""Smallest reward deviation in a weight, so a group with equal rewards is drawn rarely and not never."""


@dataclass(frozen=True)
class Priority:
    """The weight of a past group: std^advantage · exp(−recency·lag − reuse·uses − difficulty·mean reward).

    Zero switches a term off; all zeros draw uniformly. One more step of lag multiplies the weight by exp(−recency),
    one more use by exp(−reuse), and a positive difficulty prefers prompts that are rarely solved. A group without a
    policy version has lag 0, so recency does not affect it.

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
        """Return the logarithm of each weight, which does not underflow however large the lag is."""
        contrast = np.log(np.maximum(reward_std.astype(np.float64), LEAST_STD))
        discount = self.recency * lag + self.reuse * uses + self.difficulty * reward_mean.astype(np.float64)
        return np.asarray(self.advantage * contrast - discount, dtype=np.float64)


def uniforms(key: int, ordinals: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return a random number in (0, 1) for each ordinal under `key`, by the finalizer of SplitMix64.

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
