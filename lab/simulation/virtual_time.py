"""An event loop that does not wait: hours of a run take milliseconds and give the same result every time.

Time jumps to the next timer whenever no task is ready. Work that asyncio would give to a thread is done at once. So a
program that waits only through its event loop runs exactly as it would in real time, and its course depends only on its
inputs.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class StandStill(RuntimeError):
    """Every task waits for something that never happens."""


class _Jumping(selectors.SelectSelector):
    """A selector that moves the clock instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandStill("every task waits and no timer runs: this program can never continue")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Call `func` at once, in this thread, because a thread would run in real time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        # The boundary of a call that would run in a thread: its error belongs to the task that awaits it.
        except Exception as error:
            done.set_exception(error)
        return done


def run(program: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time.

    >>> import time
    >>> began = time.monotonic()
    >>> run(asyncio.sleep(3600, "an hour later")), time.monotonic() - began < 1
    ('an hour later', True)
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(program)
