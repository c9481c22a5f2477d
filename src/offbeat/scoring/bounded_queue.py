"""The queue between the callers of a scoring pool and its threads."""

import threading
from collections import deque
from copy import copy
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BoundedQueue(Generic[Item]):
    """A first-in, first-out queue for many threads, with a capacity and an end.

    >>> queue = BoundedQueue(capacity=2)
    >>> queue.put("a", seconds=1.0)
    >>> queue.get()
    'a'
    >>> queue.put("b", seconds=1.0)
    >>> queue.end(RuntimeError("stopped"))
    ['b']
    >>> print(queue.get())
    None
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended: Exception | None = None

    def put(self, item: Item, *, seconds: float) -> None:
        """Append an item. `TimeoutError` if the queue stays full; the reason for its end if it has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or len(self._items) < self.capacity, timeout=seconds):
                raise TimeoutError(f"a queue of {self.capacity} was full for {seconds:g} s")
            if self._ended is not None:
                raise copy(self._ended)  # a copy for each caller: a traceback grows each time it is raised
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item | None:
        """Wait for the next item and return it, or None if the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._items)
            if self._ended is not None:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def end(self, reason: Exception) -> list[Item]:
        """End the queue and return the items left in it. The first reason stays."""
        with self._changed:
            self._ended = self._ended or reason
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    @property
    def ended(self) -> Exception | None:
        """The reason for its end, or None if it has not ended."""
        with self._changed:
            return self._ended
