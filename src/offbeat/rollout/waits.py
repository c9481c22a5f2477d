"""No wait without a name and a deadline; no half-done step because somebody stopped waiting."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from offbeat.errors import DeadlinePassed

T = TypeVar("T")


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """The result, or `DeadlinePassed`.

    >>> asyncio.run(within(0.01, "weights v12 on worker 3", asyncio.sleep(60)))
    Traceback (most recent call last):
    offbeat.errors.DeadlinePassed: waited 0.01 s for weights v12 on worker 3
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():  # a timeout of the work itself is its own
            raise
        raise DeadlinePassed(f"waited {seconds:g} s for {what}") from None


async def uninterrupted(work: Awaitable[T]) -> T:
    """To its end, also where the caller is cancelled meanwhile; the cancellation follows then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
