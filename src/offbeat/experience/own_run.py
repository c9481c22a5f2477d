"""Whose versions count: a version is a number, and in a log that several runs share each run has a version 12.

The log keeps the run of every group whose tokens have versions. A run reads its own versions only. Groups of another
run are data without a version for it, like imported ones: their lag is unknown, and they never expire.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Group

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class OwnRun:
    """The run that a log is opened for.

    >>> one = OwnRun("81f30d94", shared=True)
    >>> one.owns("81f30d94", "host-17-3"), one.owns("5a00c2ee", "g 5a00c2ee-3"), one.owns(None, "g 81f30d94-3")
    (True, False, True)
    >>> one.is_guest("host-17-3"), one.is_guest("g 81f30d94-3")
    (True, False)
    """

    id: str
    shared: bool = False
    """True if other runs write to the log too."""

    @property
    def prefix(self) -> str:
        """How ids of groups begin that the run itself has admitted. A number follows, after a hyphen.

        In a log of its own, a repeated run names its groups alike, because random draws depend on group ids. In a
        shared log, the run's id keeps its groups apart from those of other runs.
        """
        return f"g {self.id}" if self.shared else "g"

    @property
    def trainer(self) -> str:
        """The name of the run's trainer in the ledger, after which a rewind finds the events to cancel."""
        return f"trainer {self.id}" if self.shared else "trainer"

    @cached_property
    def _admitted(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.prefix)}-\d+")

    def owns(self, run: str | None, group_id: str) -> bool:
        """True if the versions of a group are of this run. Earlier releases recorded no run."""
        if run is not None:
            return run == self.id
        return not self.shared or not self.is_guest(group_id)

    def is_guest(self, group_id: str) -> bool:
        """True for a group that the run did not admit: a worker outside of it made it, at its own pace."""
        return self._admitted.fullmatch(group_id) is None

    def masks(self, rows: "pa.Table") -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows of the table `groups` are of this run, and which of those are guests."""
        import pyarrow.compute as pc  # here, because commands that need no log read the names of runs

        admitted = pc.match_substring_regex(rows["group_id"], rf"^\Q{self.prefix}\E-[0-9]+$").to_numpy()
        own = pc.fill_null(pc.equal(rows["run"], self.id), False).to_numpy()
        own |= rows["run"].is_null().to_numpy() & (admitted | (not self.shared))
        return own, own & ~admitted

    def view(self, group: Group) -> Group:
        """Return the group as this run sees it: without versions if they are another run's."""
        spans = next((one.versions for one in group.completions if one.versions), ())
        if not spans or self.owns(spans[0].run, group.id):
            return group
        return replace(group, completions=tuple(replace(one, versions=()) for one in group.completions))
