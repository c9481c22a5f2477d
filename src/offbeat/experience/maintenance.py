"""Compaction and clean-up, beside appends and reads: they keep appending cheap and reading fast.

Each commit adds a fragment, and every manifest lists all fragments, so without this a log grows slow. Fragments are
merged in tiers, small ones often and large ones rarely: a row is rewritten a few times in its life, however long the
log. One process should see to it, the trainer for example; two get in each other's way but do no harm.

What clean-up removes is not needed by any snapshot (a snapshot is a row count, see `tables.py`). It spares versions
younger than `KEEP`, so that a read that is under way finds its files; one that is slower looks again.
"""

import logging
import threading
from datetime import timedelta
from typing import Final

from offbeat.experience.lance_table import LANCE_ERRORS, Table
from offbeat.experience.schema import Tables

TIERS: Final = (1_024, 8_192, 65_536, 524_288)
"""Rows of a fragment at each tier."""
CROWDED: Final = 16
"""Fragments smaller than a tier that make merging them worthwhile."""
KEEP: Final = timedelta(minutes=10)

_log = logging.getLogger(__name__)


def tidy(table: Table, *, keep: timedelta = KEEP) -> int:
    """Compact one table if it is crowded, then remove what nobody needs; returns how many fragments went away.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     tidy(Tables.open(place).groups)
    0
    """
    gone = 0
    for tier in TIERS:
        if sum(size < tier for size in table.fragment_sizes()) >= CROWDED:
            gone += table.compact(tier)
    if gone:
        table.clean(keep)
    return gone


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
        """Rounds that failed, mostly because another process did the same; the next round tries again."""

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            for table in self._tables:
                try:
                    tidy(table, keep=self._keep)
                except LANCE_ERRORS as error:
                    self.failures += 1
                    _log.warning("%s was not tidied, will be tried again in %g s: %s", table.uri, self._every, error)

    def __enter__(self) -> "Maintenance":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
