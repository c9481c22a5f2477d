"""Start an event loop where one may be running already: in a notebook."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def outside_event_loop(run: Callable[[], Result]) -> Result:
    """Call `run`, which starts an event loop of its own; in a notebook one is running already, so use a thread."""
    if not event_loop_runs():
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def event_loop_runs() -> bool:
    """True inside a coroutine, and in a cell of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
