"""The limits of a draw."""

from dataclasses import dataclass
from typing import Literal

from offbeat.types import GroupDrift

Cause = Literal["expired", "too-small", "zero-variance"]
"""Why a group is never drawn."""
RetireCause = Literal["drift", "ess", "age", "refused"]
"""Why a drawn group is not drawn again."""


@dataclass(frozen=True)
class SamplerLimits:
    """The limits of a draw in every mode."""

    batch: int
    """Groups in a batch."""
    max_lag: int | None = None
    """A group that was never drawn expires when k − its oldest version exceeds this. One without a policy version never
    does. Groups that were drawn have the `retire` limits."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal. By default the objective masks them."""
    variance_tolerance: float = 1e-6
    """A standard deviation up to this counts as zero."""
    tasks: frozenset[int] | None = None
    """Numbers of the tasks to draw from; None means all. Groups of other tasks stay waiting and are not dropped."""
    sources: int | None = None
    """Bits of the sources to draw from, at least one of which a group needs; None means all."""
    retire_drift: float | None = None
    """A drawn group is not drawn again once its measured drift exceeds this; None for no limit."""
    retire_ess: float | None = None
    """A drawn group is not drawn again once its measured effective sample size is below this; None for no limit."""
    retire_age: int | None = None
    """A drawn group is not drawn again once k − its oldest version exceeds this; None for no limit."""

    def exceeded(self, found: GroupDrift) -> RetireCause | None:
        """Return which limit a measured group is beyond, or None."""
        if self.retire_drift is not None and found.tv > self.retire_drift:
            return "drift"
        return "ess" if self.retire_ess is not None and found.ess < self.retire_ess else None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch} must be at least 1 group")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag} must be at least 0 (only the current version), or None")
