"""The background threads of the log: group commit of appends, and compaction of tables.

Group commit: while one commit is being written, new submissions are collected and become the next commit. So many
small appends become few commits, and a single append is written at once.

Compaction: each commit adds a fragment, and every manifest lists all fragments, so a log gets slower unless fragments
are merged. They are merged in tiers, small ones often and large ones rarely: a row is rewritten only a few times,
however long the log gets. Run compaction in one process, for example the trainer. Two processes get in each other's
way but do no harm. Compaction runs beside appends and reads.

Clean-up removes files that no snapshot needs (a snapshot is a row count, see `schema.py`). It keeps versions younger
than `KEEP`, so a read in progress finds its files; a slower read refreshes its handle and retries.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Final, Generic, TypeVar

from offbeat.errors import LogWriteError
from offbeat.experience.lance_table import Table, is_lance_error
from offbeat.experience.schema import Tables

T = TypeVar("T")
R = TypeVar("R")

MAX_QUEUED: Final = 64
"""Submissions that may wait for the commit in progress. The next one blocks, so memory stays bounded."""
DEADLINE: Final = 600.0
"""Seconds after which waiting for a commit is an error."""
TIERS: Final = (64, 512, 4_096, 32_768, 262_144)
"""Rows of a fragment at each tier."""
CROWDED: Final = 16
"""Number of fragments below the lowest tier from which merging them is worthwhile; half as many at higher tiers."""
KEEP: Final = timedelta(minutes=10)

_log = logging.getLogger(__name__)


class Committer(Generic[T]):
    """A thread that takes items in order and passes them to `write` in batches.

    >>> written: list[list[str]] = []
    >>> with Committer(lambda batch: written.append(list(batch)), "example") as committer:
    ...     wait(committer.submit("a"))
    >>> written
    [['a']]
    """

    def __init__(self, write: Callable[[Sequence[T]], None], name: str) -> None:
        self._write = write
        self._name = name
        self._queue: queue.Queue[tuple[T, Future[None]] | None] = queue.Queue(MAX_QUEUED)
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, item: T) -> Future[None]:
        """Queue an item. The future is done once the item is committed and on disk."""
        future: Future[None] = Future()
        try:
            with self._starting:  # so that no item is queued behind the end marker
                self._start()
                self._queue.put((item, future), timeout=DEADLINE)
        except queue.Full:
            raise LogWriteError(
                f"waited {DEADLINE:.0f} s to queue an append to {self._name}: its storage does not respond"
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
        except BaseException as error:  # the boundary of the thread: every waiting caller must get the error
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
    """Return the future's result, or raise `LogWriteError` if there is none within `DEADLINE`."""
    try:
        return future.result(DEADLINE)
    except TimeoutError:
        raise LogWriteError(
            f"no acknowledgement within {DEADLINE:.0f} s: the storage does not respond. The append may still succeed;"
            f" repeating it is harmless"
        ) from None


def after_all(futures: Sequence["Future[None]"], result: R) -> "Future[R]":
    """Return a future that has `result` once all of these are done, or the error of one that failed."""
    combined: Future[R] = Future()
    remaining = len(futures)
    counting = threading.Lock()

    def one_done(_: "Future[None]") -> None:
        nonlocal remaining
        with counting:
            remaining -= 1
            if remaining > 0:
                return
        if not combined.set_running_or_notify_cancel():  # a run that ends at once no longer waits for it
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


def tidy(table: Table, *, keep: timedelta = KEEP) -> int:
    """Compact a crowded table and remove files that are no longer needed. Return by how many fragments it shrank."""
    removed = 0
    for tier in TIERS:
        small = [size for size in table.fragment_sizes() if size < tier]
        # Above the lowest tier fragments are merged once they fill one: each row is copied once for each tier.
        if len(small) >= CROWDED if tier == TIERS[0] else len(small) >= CROWDED // 2 and sum(small) >= tier:
            removed += table.compact(tier)
    if removed:
        table.clean(keep)
    return removed


class Maintenance:
    """A thread that tidies all tables of a log every few seconds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, Maintenance(Tables.open(place), every=0.01) as maintenance:
    ...     maintenance.failures
    0
    """

    def __init__(self, tables: Tables, *, every: float = 5.0, keep: timedelta = KEEP) -> None:
        self._tables = (tables.groups, tables.scores, tables.events, tables.quarantine)
        self._every, self._keep = every, keep
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maintenance of the experience log", daemon=True)
        self.failures = 0
        """Rounds that failed, mostly because another process compacted at the same time. The next round retries."""

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            for table in self._tables:
                try:
                    tidy(table, keep=self._keep)
                except BaseException as error:
                    if not is_lance_error(error):
                        raise
                    self.failures += 1
                    _log.warning("could not compact %s, retrying in %g s: %s", table.uri, self._every, error)

    def __enter__(self) -> "Maintenance":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
