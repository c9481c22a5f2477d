"""Start an event loop: where one may be running already, in a notebook, and where Ctrl-C may come at any moment."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def outside_event_loop(run: Callable[[], Result]) -> Result:
    """Call `run`, which starts an event loop of its own; in a notebook one is running already, so use a thread."""
    if not event_loop_runs():
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def run_coroutine(main: Coroutine[object, object, Result]) -> Result:
    """Run a coroutine in a new event loop. An interrupt that comes before the loop runs is handled once it does.

    Earlier, it would leave half a loop, whose destructor prints a traceback.
    """
    handler, waiting = signal.getsignal(signal.SIGINT), list[int]()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(handler) or handler is signal.default_int_handler:  # asyncio replaces the default
        return asyncio.run(main)

    def wait(number: int, frame: object) -> None:
        waiting.append(number)

    def release() -> None:
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, handler)
            for number in waiting:
                signal.raise_signal(number)

    async def released() -> Result:
        release()
        return await main

    signal.signal(signal.SIGINT, wait)
    try:
        return asyncio.run(released())
    finally:
        release()  # if the loop could not be made


def event_loop_runs() -> bool:
    """True inside a coroutine, and in a cell of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
