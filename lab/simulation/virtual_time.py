"""An event loop that does not wait: hours of a run in milliseconds, the same every time.

Time jumps to the next timer whenever nothing is left to do now. What asyncio would do in a thread is done at once. So a
program that waits only through its event loop runs exactly as it would, and its course depends on its inputs alone.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class StandStill(RuntimeError):
    """Everything waits for something that will never happen."""


class _Jumping(selectors.SelectSelector):
    """Instead of sleeping, moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandStill("every task waits, and no timer runs: this program stands still for ever")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jumping.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Now, in this thread: threads have a time of their own."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        # The boundary of a call that would have run elsewhere: its error belongs to whoever waits for it.
        except Exception as error:
            done.set_exception(error)
        return done


def run(program: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time.

    >>> import time
    >>> began = time.monotonic()
    >>> run(asyncio.sleep(3600, "an hour later")), time.monotonic() - began < 1
    ('an hour later', True)
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(program)
