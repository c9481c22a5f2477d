"""A trainer that reports with each step how scoring went since the step before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offbeat.events import EventKind
from offbeat.run.journal import Journal
from offbeat.run.protocols import Learner
from offbeat.run.scoring_counts import ScoringCounts
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, StepContext


@dataclass(frozen=True)
class CountedLearner:
    """A `Learner` around another one: it adds the shares of `ScoringCounts` to the metrics, and writes the event."""

    learner: Learner
    counts: ScoringCounts
    journal: Journal

    @property
    def step(self) -> int:
        return self.learner.step

    def check(self) -> None:
        self.learner.check()

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        outcome = await self.learner.train(groups, context)
        if isinstance(outcome, RefusedBatch):
            return outcome
        metrics, failures = self.counts.metrics(), self.counts.failures()
        self.counts.clear()
        if failures:
            self.journal.write(EventKind.UNSCORABLE, outcome.step, versions=failures)
        return replace(outcome, metrics=outcome.metrics | metrics)

    async def publish(self, version: int) -> Mapping[str, Json]:
        return await self.learner.publish(version)

    async def save(self, state: Mapping[str, Json]) -> None:
        await self.learner.save(state)

    async def finish(self) -> None:
        await self.learner.finish()
