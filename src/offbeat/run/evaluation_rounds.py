"""The evaluations of a run, one after the other: a version is due, its rates are measured, an event is written."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import WaitExpired
from offbeat.events import EventKind
from offbeat.run.desk import Desk
from offbeat.run.evaluation_leases import EvaluationLeases, EvaluationPrompt, EvaluationSchedule
from offbeat.run.journal import Journal
from offbeat.types import Json


@dataclass(frozen=True)
class EngineEvaluation:
    """Measures the pass rates of a published version: the run's workers answer, on the engines that serve it."""

    desk: Desk
    prompts: Callable[[int], Sequence[EvaluationPrompt]]
    """What is asked of a version."""
    lease_seconds: float
    patience: float
    """Seconds without an answer after which the run ends with an error."""
    clock: Callable[[], float]

    async def __call__(self, version: int) -> Mapping[str, Json]:
        """Return the pass rates. The version must stay the newest until then."""
        leases = EvaluationLeases(version, self.prompts(version), self.lease_seconds)
        answered, last_answer = 0, self.clock()
        await self.desk.evaluate(leases)
        try:
            while leases.missing:
                waited = self.clock() - last_answer
                if waited > self.patience:
                    raise WaitExpired(f"{_describe_wait(leases, waited)}; check the workers, or raise run.patience")
                await self.desk.wait_for_change(self.patience - waited + 0.1)
                if leases.answered > answered:
                    answered, last_answer = leases.answered, self.clock()
        finally:
            await self.desk.evaluate(None)
        return leases.rates()


def _describe_wait(leases: EvaluationLeases, waited: float) -> str:
    in_flight = ", ".join(f"{lease.group_id} by {lease.by}" for lease in leases.out[:5]) or "none"
    return (
        f"waited {waited:.0f} s for {leases.missing} answers to evaluation prompts by version {leases.version}; in "
        f"flight: {in_flight}"
    )


@dataclass
class EvaluationRounds:
    """Starts evaluations that are due, at most one at a time."""

    rates: Callable[[int], Awaitable[Mapping[str, Json]]]
    """Measures a version: `EngineEvaluation`, or the trainer with its own model."""
    schedule: EvaluationSchedule
    journal: Journal
    on_engines: bool = True
    """False: the trainer's model is evaluated, published or not."""
    overlap: bool = False
    """True: training continues meanwhile, until the next publish."""
    _running: asyncio.Task[None] | None = None

    def begin(self, published: int, step: Callable[[], int]) -> None:
        """Start an evaluation if one is due. Its event carries the step at which it ends."""
        version = self.schedule.begin(published if self.on_engines else step())
        if version is not None:
            self._running = asyncio.create_task(self._evaluate(version, step))

    async def _evaluate(self, version: int, step: Callable[[], int]) -> None:
        rates = await self.rates(version)
        self.schedule.end()
        self.journal.write(EventKind.EVALUATED, step(), version=version, **rates)

    async def finish(self, keep_waiting: Callable[[], bool], poll_seconds: float) -> None:
        """Wait for the running evaluation as long as `keep_waiting` returns True."""
        while self._running is not None and keep_waiting():
            await asyncio.wait([self._running], timeout=poll_seconds)
            if self._running.done():
                running, self._running = self._running, None
                running.result()

    async def cancel(self) -> None:
        """End the running evaluation without a result. A resumed run repeats it."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
