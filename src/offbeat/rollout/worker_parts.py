"""The weight log as a worker sees it, and what a worker counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from offbeat.weights.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor


class Policies(Protocol):
    """The part of `weights.subscriber.Subscription` that a worker uses."""

    def newest(self) -> int | None:
        """Return the newest complete version."""

    def fetch(self, version: int, *, from_anchor: bool = False) -> "Mapping[str, Tensor]":
        """Return the verified weights of a version."""

    def probe(self, version: int) -> Probe | None: ...


@dataclass
class WorkerTally:
    """Counts of a worker's work so far."""

    groups: int = 0
    tokens: int = 0
    evaluated: int = 0
    """Evaluation prompts answered."""
    refused: int = 0
    """Groups that failed validation and are in quarantine."""
    discarded: int = 0
    """Groups generated between a load and its failed probe, or while an engine died."""
    loads: int = 0
    quarantines: int = 0
    starts: int = 0
    notices: list[str] = field(default_factory=list)
    """Error messages, in order."""
