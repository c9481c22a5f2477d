"""A bounded line of things to do, with an end: `put` blocks while it is full, `take` while it is empty."""

import threading
from collections import deque
from copy import copy
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Line(Generic[Item]):
    """First in, first out, for many threads on both sides.

    >>> line = Line(room=2)
    >>> line.put("a", seconds=1.0)
    >>> line.take()
    'a'
    >>> line.put("b", seconds=1.0)
    >>> line.end(RuntimeError("enough"))
    ['b']
    >>> print(line.take())
    None
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended: Exception | None = None

    def put(self, item: Item, *, seconds: float) -> None:
        """Add at the back. `TimeoutError` where no room came in time; what `end` was given where it has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or len(self._items) < self.room, timeout=seconds):
                raise TimeoutError(f"no room in a line of {self.room} within {seconds:g} s")
            if self._ended is not None:
                raise copy(self._ended)  # one for each: a traceback grows wherever it is raised
            self._items.append(item)
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Take from the front, waiting for work as long as it takes; None when the line has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._items)
            if self._ended is not None:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def end(self, why: Exception) -> list[Item]:
        """Let nobody put or take any more; returns what was left. The first reason given stays."""
        with self._changed:
            self._ended = self._ended or why
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    @property
    def ended(self) -> Exception | None:
        """Why it ended; None while it has not."""
        with self._changed:
            return self._ended
