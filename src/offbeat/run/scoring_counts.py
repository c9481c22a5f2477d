"""What became of completions in scoring, by policy version, counted when their groups are finished.

The trainer sees only groups that can be trained; groups that could not be scored are dropped before. So the shares of
unscorable completions and of answers that made their own scoring fail are counted at the desk, where every group of the
run passes, and become metrics of the next step (`counted_learner.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.scoring.tally import SCORED, OutcomeCount
from offbeat.types import Json


@dataclass
class ScoringCounts:
    """Outcomes since they were last taken.

    >>> counts = ScoringCounts()
    >>> counts.add([(3, "scored", 6), (3, "answer timeout", 1), (4, "grader sandbox", 1)])
    >>> counts.metrics()
    {'unscorable_share': 0.125, 'answer_fault_share': 0.125}
    >>> counts.failures()
    {'3': {'answer timeout': 1, 'scored': 6}, '4': {'grader sandbox': 1}}
    """

    _found: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, outcomes: Sequence[OutcomeCount]) -> None:
        for version, what, count in outcomes:
            self._found[version, what] += count

    def metrics(self) -> dict[str, float]:
        """Return both shares; empty if nothing was generated."""
        total = self._found.total()
        blamed = Counter[str]()
        for (_, what), count in self._found.items():
            blamed[what.partition(" ")[0]] += count
        if not total:
            return {}
        return {"unscorable_share": blamed["grader"] / total, "answer_fault_share": blamed["answer"] / total}

    def failures(self) -> dict[str, Json]:
        """Return the counts by version, of versions with at least one failure."""
        versions = sorted({version for version, what in self._found if what != SCORED})
        return {
            str(version): {what: count for (of, what), count in sorted(self._found.items()) if of == version}
            for version in versions
        }

    def clear(self) -> None:
        self._found.clear()
