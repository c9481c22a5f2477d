"""Start an event loop: where one may be running already (a notebook), and where Ctrl-C may come."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Result = TypeVar("Result")
_driving: Final = threading.Event()


def outside_event_loop(run: Callable[[], Result]) -> Result:
    """Call `run`, which starts an event loop of its own; in a notebook one is running already, so use a thread."""
    if not event_loop_runs():
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def run_coroutine(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine in a new event loop, which counts as running while it is made and closed.

    An interrupt that is raised in between leaves half a loop, whose destructor prints a traceback.
    """
    _driving.set()
    try:
        return asyncio.run(main)
    finally:
        _driving.clear()


def event_loop_runs() -> bool:
    """True inside a coroutine, in a cell of a notebook, and within `run_coroutine`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _driving.is_set()
    return True
