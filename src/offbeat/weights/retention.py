"""Retention: reader leases, pins, and a pure rule for which versions may be removed.

Kept are the newest `keep` versions, and those of reader leases and pins. The `keep` of a run covers every group that
waits to be trained: such a group is at most `Config.fresh_lag` steps old, so its version is one of the newest
`Config.open_versions`. Checkpoints pin the version that they serve.

A version needs its chain: the patches back to the nearest anchor, and that anchor. Unneeded versions are removed
latest first, so a publisher that is killed half-way leaves no version with a broken chain.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final
from urllib.parse import quote, unquote

from offbeat.storage.store import Store

LEASE_SECONDS: Final = 600.0
"""A reader that neither polls nor fetches for this long counts as dead. Far longer than host clocks differ."""
_READERS: Final = "readers"
_PINS: Final = "pins"


class ReaderLease:
    """One reader's claim on the versions it uses.

    >>> import tempfile, time
    >>> from pathlib import Path
    >>> from offbeat.storage.store import LocalStore
    >>> with tempfile.TemporaryDirectory() as place:
    ...     store = LocalStore(Path(place))
    ...     lease = ReaderLease(store, "worker 3", time.time)
    ...     lease.hold({4, 7})
    ...     leased(store, time.time(), known=[4, 5, 6, 7])
    {4, 7}
    """

    def __init__(self, store: Store, name: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._file = f"{_READERS}/{quote(name, safe='')}.{secrets.token_hex(4)}.json"
        self._name = name
        self._clock = clock
        self._versions: set[int] | None = None
        self._written = 0.0

    def hold(self, versions: set[int]) -> None:
        """Declare these versions, and no others, to be in use."""
        if versions != self._versions:
            self._versions = set(versions)
            self._write()

    def renew(self) -> None:
        """Keep the lease alive. Cheap to call often: it writes only every quarter of `LEASE_SECONDS`."""
        if self._versions is not None and self._clock() - self._written > LEASE_SECONDS / 4:
            self._write()

    def release(self) -> None:
        if self._versions is not None:
            self._versions = None
            self._store.remove([self._file])

    def _write(self) -> None:
        content = json.dumps({"name": self._name, "versions": sorted(self._versions or ())}).encode()
        self._store.put(self._file, content, durable=False)
        self._written = self._clock()


def leased(store: Store, now: float, known: Iterable[int]) -> set[int]:
    """Return the versions that live readers use, and remove the lease files of readers long dead."""
    versions: set[int] = set()
    for file in store.list_files(_READERS):
        name, age = f"{_READERS}/{file.name}", now - file.modified
        if age > 10 * LEASE_SECONDS:
            store.remove([name])
        elif age <= LEASE_SECONDS:
            try:
                versions |= set(json.loads(store.read(name))["versions"])
            except FileNotFoundError:
                continue  # released since it was listed
            except (ValueError, KeyError, TypeError):
                versions |= set(known)  # a live reader with an unreadable lease: keep everything
    return versions


def pin(store: Store, version: int, by: str) -> None:
    """Keep a version until `unpin`. `by` names the reason, and one version may have several.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from offbeat.storage.store import LocalStore
    >>> with tempfile.TemporaryDirectory() as place:
    ...     pin(LocalStore(Path(place)), 12, "checkpoint 12")
    ...     pinned(LocalStore(Path(place)))
    {12: ['checkpoint 12']}
    """
    store.put(_pin_name(version, by), b"")


def unpin(store: Store, version: int, by: str) -> None:
    """Remove a pin; harmless if there is none."""
    store.remove([_pin_name(version, by)])


def pinned(store: Store) -> dict[int, list[str]]:
    """Return the names of the pins of each pinned version."""
    pins: dict[int, list[str]] = {}
    for name in store.list_names(_PINS):
        version, _, by = name.partition("@")
        if version.isdecimal():
            pins.setdefault(int(version), []).append(unquote(by))
    return pins


def _pin_name(version: int, by: str) -> str:
    return f"{_PINS}/{version:010}@{quote(by, safe='')}"


def chain(version: int, bases: Mapping[int, int | None]) -> list[int]:
    """Return a version and all versions it depends on, given the base of each (None for an anchor).

    >>> chain(12, {10: None, 11: 10, 12: 11})
    [12, 11, 10]
    """
    links = [version]
    while (base := bases.get(links[-1])) is not None:
        links.append(base)
    return links


def removable(bases: Mapping[int, int | None], keep: int, needed: Collection[int] = ()) -> list[int]:
    """Return the versions on which neither the newest `keep` nor `needed` depend, in the order to remove them.

    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2)
    [1, 0]
    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2, needed=[0])
    [1]
    """
    wanted: Iterable[int] = {*sorted(bases)[-max(keep, 1) :], *(set(needed) & bases.keys())}
    kept = {link for version in wanted for link in chain(version, bases)}
    return sorted(bases.keys() - kept, reverse=True)
