"""Work that must succeed before the first step, done while workers start their engines and generate."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass


@dataclass
class Preparation:
    """One piece of work that a run starts early and waits for late.

    >>> async def run() -> str:
    ...     async def work() -> None:
    ...         done.append("checked")
    ...     done: list[str] = []
    ...     preparation = Preparation(work)
    ...     await preparation.begin(alone=False)
    ...     await preparation.finish()
    ...     return done[0]
    >>> asyncio.run(run())
    'checked'
    """

    work: Callable[[], Coroutine[None, None, None]] | None = None
    """None: there is nothing to prepare."""
    _task: "asyncio.Task[None] | None" = None

    async def begin(self, *, alone: bool) -> None:
        """Start the work. With `alone`, wait for its end: the trainer's model may be needed for an evaluation."""
        if self.work is not None:
            self._task = asyncio.create_task(self.work())
            if alone:
                await self._task

    def check(self) -> None:
        """Raise the error of the work if it has failed."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def finish(self) -> None:
        """Wait for the end of the work; raise its error if it fails."""
        if self._task is not None:
            await self._task

    async def settle(self) -> None:
        """Wait for the end of the work, for a run that ends before its first step."""
        if self._task is not None:
            await asyncio.wait([self._task])
