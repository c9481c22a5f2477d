"""One GPU for the trainer and the engine of a run: they take turns.

              a call of the engine
    TRAINER ──────────────────────────▶ ENGINE      optimizer to the host, if the plan says so; the engine wakes
            ◀──────────────────────────
              a call of the trainer                 the engine sleeps; optimizer back to the GPU

A turn changes only between calls: a call of the other side waits until those under way have ended. In lockstep mode the
trainer asks when the batch is complete, so it does not wait long.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import DeadlinePassed, EngineDead
from offbeat.rollout.engine import Engine, Request, Weights, within
from offbeat.types import Completion


class GpuUser(StrEnum):
    """Who may use the GPU."""

    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass
class SharedGpu:
    """The GPU that trainer and engine share. The trainer has the first turn."""

    move_optimizer: Callable[[GpuUser], None]
    """Called in a thread before a turn begins: away from the GPU for the engine, back for the trainer."""
    patience: float
    """Seconds that a side waits for the calls of the other to end."""
    turn: GpuUser = GpuUser.TRAINER
    changes: int = 0
    _calls: int = 0
    _engine: Engine | None = None
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def take(self, turn: GpuUser) -> AsyncIterator[None]:
        """Hold the GPU during a call. Calls of the same side may overlap."""
        async with self._changed:
            other = f"the {self.turn} to end its turn on the GPU that it shares with the {turn}"
            free = self._changed.wait_for(lambda: self._calls == 0 or self.turn is turn)
            await within(self.patience, other, free)
            if self.turn is not turn:
                await self._change(turn)
            self._calls += 1
        try:
            yield
        finally:
            async with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    async def start(self, start_engine: Callable[[], Awaitable[Engine]]) -> "SharedEngine":
        """Start an engine in its turn."""
        async with self.take(GpuUser.ENGINE):
            self._engine = await start_engine()
        return SharedEngine(self._engine, self)

    async def _change(self, turn: GpuUser) -> None:
        if turn is GpuUser.TRAINER:
            await self._put_to_sleep()
            await asyncio.to_thread(self.move_optimizer, turn)
        else:
            await asyncio.to_thread(self.move_optimizer, turn)
            if self._engine is not None:
                await self._engine.wake()
        self.turn = turn
        self.changes += 1

    async def _put_to_sleep(self) -> None:
        if self._engine is None:
            return
        try:
            await self._engine.sleep()
        except EngineDead:  # its worker starts another; until then its memory must be free
            await self._engine.close()
            self._engine = None

    def forget(self, engine: Engine) -> None:
        """Note that an engine is closed: it no longer sleeps or wakes."""
        if self._engine is engine:
            self._engine = None


@dataclass
class SharedEngine:
    """An `Engine` that computes only in its turn."""

    engine: Engine
    gpu: SharedGpu

    @property
    def version(self) -> int | None:
        return self.engine.version

    @property
    def holds_several(self) -> bool:
        return self.engine.holds_several

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        async with self._turn():
            return await self.engine.generate(requests)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        async with self._turn():
            return await self.engine.logprobs(sequences)

    async def load(self, version: int, weights: Weights) -> None:
        async with self._turn():
            await self.engine.load(version, weights)

    def serve(self) -> None:
        self.engine.serve()

    async def health(self) -> None:
        """See `Engine`. It does not need the GPU, so it answers in the trainer's turn too."""
        await self.engine.health()

    async def close(self) -> None:
        self.gpu.forget(self.engine)
        await self.engine.close()

    async def sleep(self) -> None:
        raise RuntimeError("an engine on a shared GPU sleeps when the trainer's turn begins; do not call sleep")

    async def wake(self) -> None:
        raise RuntimeError("an engine on a shared GPU wakes when its turn begins; do not call wake")

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with self.gpu.take(GpuUser.ENGINE):
                yield
        except DeadlinePassed as late:
            raise EngineDead(str(late)) from None
