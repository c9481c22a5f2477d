"""Does this engine serve what was published? The tolerance is the engine's own, measured at version 0.

    prober = await Prober.calibrated(engine, subscription.probe(0))     # the engine still has version 0
    verdict = await prober.check(engine, subscription.probe(12))

Two questions. Is the gap to the trainer no wider than a few times what it was at version 0? And did the engine's
log-probs move as the trainer's moved? The second needs a move that stands out from rounding. In float32 every step
does, and shows an engine that is stale long before the gap would. In 16 bits one step may not: then the move adds up
over versions until it can be judged. And in 16 bits the log-probs of a few unlikely tokens jump by whole nats where
hardly a weight has changed, in trainer and engine alike: so sizes are medians, and so is what the engine followed.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ProbeError, ProbeFailed
from offbeat.rollout.engine import Engine
from offbeat.weights.probe import Probe

FLOOR: Final = 1e-4
"""A gap below this is rounding, whatever it was at version 0."""
SLACK: Final = 3.0
"""How many times the gap of version 0 is still the same engine."""
LARGEST: Final = 0.25
"""A mean gap beyond this at version 0 is another model, not another rounding."""
STANDS_OUT: Final = 5.0
"""How many times as large as rounding a move must be to be judged."""
HALF_HEARTED: Final = 0.3
"""How far from 1 what an engine followed may be, beyond what rounding explains: half of a model that stays is seen."""


@dataclass(frozen=True)
class ProbeVerdict:
    """What a check found.

    >>> ProbeVerdict(gap=3e-6, tolerance=1e-4, followed=0.999).passed
    True
    >>> print(ProbeVerdict(gap=0.04, tolerance=0.12, followed=0.0, doubt=0.1))
    followed 0.00 of the trainer's move, where 1 was due and 0.60 would do
    """

    gap: float
    """Mean absolute difference of log-probs to the trainer's, at the same version: the engine gap."""
    tolerance: float
    followed: float | None = None
    """How much of the trainer's move since the last judgement the engine made: 1 is all of it, 0 is none. None while
    the move does not stand out from rounding."""
    doubt: float = 0.0
    """How much of `followed` rounding may have hidden."""

    @property
    def near(self) -> bool:
        """Whether the gap is within tolerance; a gap that is not a number is not."""
        return self.gap <= self.tolerance

    @property
    def moved(self) -> bool:
        """Whether nothing speaks against the engine having followed."""
        return self.followed is None or abs(self.followed - 1) <= HALF_HEARTED + self.doubt

    @property
    def passed(self) -> bool:
        """Both."""
        return self.near and self.moved

    def __str__(self) -> str:
        if not self.near:
            return f"mean |Δlogp| to the trainer is {self.gap:.2g}, and {self.tolerance:.2g} is tolerated"
        if not self.moved:
            enough = 1 - HALF_HEARTED - self.doubt
            return f"followed {self.followed:.2f} of the trainer's move, where 1 was due and {enough:.2f} would do"
        return f"passed: mean |Δlogp| {self.gap:.2g} of {self.tolerance:.2g} tolerated"


@dataclass
class Prober:
    """One engine's checks."""

    rounding: float
    """The usual gap of a token at version 0: what engine and trainer differ by when nothing is wrong."""
    tolerance: float
    published: NDArray[np.float32]
    """The trainer's log-probs when a move was judged last, and …"""
    measured: NDArray[np.float32]
    """… the engine's."""

    @classmethod
    async def calibrated(cls, engine: Engine, probe: Probe) -> "Prober":
        """With the tolerance that this engine needs; it must be serving the probe's version, usually 0."""
        measured = await _measure(engine, probe)
        gaps = (measured - probe.values).astype(np.float64)
        gap = float(np.abs(gaps).mean())
        if not gap <= LARGEST:
            raise ProbeFailed(
                f"before any load the engine differs from the published version by {gap:.2g} a token: its model "
                "directory is not what this run started from, or the engine computes it wrongly"
            )
        return cls(usual_size(gaps), max(FLOOR, SLACK * gap), probe.values, measured)

    async def check(self, engine: Engine, probe: Probe) -> ProbeVerdict:
        """Whether the engine serves the version that the probe belongs to."""
        measured = await _measure(engine, probe)
        verdict = judge(self, probe.values, measured)
        if verdict.passed and verdict.followed is not None:
            self.published, self.measured = probe.values, measured
        return verdict


def judge(before: Prober, published: NDArray[np.float32], measured: NDArray[np.float32]) -> ProbeVerdict:
    """The two questions, on plain numbers.

    >>> start = Prober(0.001, 0.12, np.array([-1.0, -2.0], np.float32), np.array([-1.001, -1.999], np.float32))
    >>> new = np.array([-1.01, -1.98], np.float32)
    >>> judge(start, new, np.array([-1.011, -1.98], np.float32)).passed
    True
    >>> judge(start, new, start.measured).followed   # nothing moved: a stale engine, well within its tolerance
    0.0
    """
    if published.shape != before.published.shape:
        raise ProbeError(f"the probe has {published.size} log-probs, the one before had {before.published.size}")
    gap = float(np.abs(measured - published).mean())
    due = published.astype(np.float64) - before.published
    done = measured.astype(np.float64) - before.measured
    size = usual_size(due)
    if size <= STANDS_OUT * before.rounding:
        return ProbeVerdict(gap, before.tolerance)
    far = np.abs(due) >= np.median(np.abs(due))
    # Rounding of the trainer's own, at both ends of its move, makes the move look longer than it is.
    doubt = 2 * (before.rounding / size) ** 2
    return ProbeVerdict(gap, before.tolerance, float(np.median(done[far] / due[far])), doubt)


def usual_size(moves: NDArray[np.float64]) -> float:
    """The size of most: the standard deviation that normal numbers with this median would have.

    >>> round(usual_size(np.array([0.1, -0.1, 0.1, -9.0])), 3)
    0.148
    """
    return 1.4826 * float(np.median(np.abs(moves)))


async def _measure(engine: Engine, probe: Probe) -> NDArray[np.float32]:
    return np.concatenate(await engine.logprobs(probe.sequences))
