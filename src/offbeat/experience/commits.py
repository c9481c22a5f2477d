"""Group commit: many small appends become few commits, and nobody waits longer for it.

While one commit is being written, what arrives meanwhile is gathered and becomes the next one. A lone append is
written at once.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from offbeat.errors import LogWriteError

T = TypeVar("T")
R = TypeVar("R")

QUEUED: Final = 64
"""Submissions that may wait for the commit in progress; the next one blocks, so memory stays bounded."""
DEADLINE: Final = 600.0
"""Seconds after which waiting for a commit is an error and not a wait."""


class Committer(Generic[T]):
    """A thread that takes items in order and hands them to `write` in batches.

    >>> written: list[list[str]] = []
    >>> with Committer(lambda batch: written.append(list(batch)), "example") as committer:
    ...     wait(committer.submit("a"))
    >>> written
    [['a']]
    """

    def __init__(self, write: Callable[[Sequence[T]], None], name: str) -> None:
        self._write = write
        self._name = name
        self._queue: queue.Queue[tuple[T, Future[None]] | None] = queue.Queue(QUEUED)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, item: T) -> Future[None]:
        """Queue an item. The future is done once it is committed and on disk."""
        future: Future[None] = Future()
        try:
            with self._starting:  # nothing is queued behind the end
                self._start()
                self._queue.put((item, future), timeout=DEADLINE)
        except queue.Full:
            raise LogWriteError(
                f"waited {DEADLINE:.0f} s to queue for {self._name}: its storage does not answer"
            ) from None
        return future

    def _start(self) -> None:
        if self._closed:
            raise LogWriteError(f"{self._name} is closed; open the log again to append")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"commit {self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, last = [first], False
            while not self._queue.empty() and not last:
                item = self._queue.get()
                last = item is None
                if item is not None:
                    batch.append(item)
            self._commit(batch)
            if last:
                return

    def _commit(self, batch: list[tuple[T, Future[None]]]) -> None:
        try:
            self._write([item for item, _ in batch])
        except BaseException as error:  # the boundary of the thread: whatever it is, those who wait must hear of it
            for _, future in batch:
                future.set_exception(error)
        else:
            for _, future in batch:
                future.set_result(None)

    def close(self) -> None:
        """Commit what is queued, then stop."""
        with self._starting:
            if self._thread is not None and not self._closed:
                self._queue.put(None)
            self._closed = True
        if self._thread is not None:
            self._thread.join(DEADLINE)

    def __enter__(self) -> "Committer[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait(future: "Future[R]") -> R:
    """The future's result; what did not come in time was not acknowledged."""
    try:
        return future.result(DEADLINE)
    except TimeoutError:
        raise LogWriteError(
            f"no acknowledgement within {DEADLINE:.0f} s: the storage does not answer. The append may still go through;"
            f" repeating it is harmless"
        ) from None


def after_all(futures: Sequence["Future[None]"], result: R) -> "Future[R]":
    """A future that has `result` once all of these are done, or the error of one that failed.

    >>> after_all([], "receipt").result()
    'receipt'
    """
    combined: Future[R] = Future()
    remaining = len(futures)
    counting = threading.Lock()

    def one_done(_: "Future[None]") -> None:
        nonlocal remaining
        with counting:
            remaining -= 1
            if remaining > 0:
                return
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            combined.set_exception(errors[0])
        else:
            combined.set_result(result)

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        combined.set_result(result)
    return combined
