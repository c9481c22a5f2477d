"""Which versions may go: a pure rule over version numbers.

A version needs its chain: the patches back to the nearest anchor, and that anchor. What nobody needs may go, the latest
first, so that whoever is killed in between leaves no version whose chain is broken.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final
from urllib.parse import quote, unquote

from offbeat.storage.store import Store

LEASE_SECONDS: Final = 600.0
"""A reader that did not poll or fetch for this long is taken for dead. Much more than clocks of hosts differ."""
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
        """Say that these are in use, and no others."""
        if versions != self._versions:
            self._versions = set(versions)
            self._write()

    def renew(self) -> None:
        """Cheap: writes only once in a while."""
        if self._versions is not None and self._clock() - self._written > LEASE_SECONDS / 4:
            self._write()

    def release(self) -> None:
        """Nothing is in use any more."""
        if self._versions is not None:
            self._versions = None
            self._store.remove([self._file])

    def _write(self) -> None:
        content = json.dumps({"name": self._name, "versions": sorted(self._versions or ())}).encode()
        self._store.put(self._file, content, durable=False)
        self._written = self._clock()


def leased(store: Store, now: float, known: Iterable[int]) -> set[int]:
    """The versions that live readers use. Files of readers long dead are removed on the way."""
    versions: set[int] = set()
    for file in store.found(_READERS):
        name, age = f"{_READERS}/{file.name}", now - file.modified
        if age > 10 * LEASE_SECONDS:
            store.remove([name])
        elif age <= LEASE_SECONDS:
            try:
                versions |= set(json.loads(store.read(name))["versions"])
            except FileNotFoundError:
                continue  # it was released this moment
            except (ValueError, KeyError, TypeError):
                versions |= set(known)  # somebody is there, and what they need cannot be read: keep everything
    return versions


def pin(store: Store, version: int, by: str) -> None:
    """Keep a version until it is unpinned.

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
    """Take back what `pin` did; harmless where it did not."""
    store.remove([_pin_name(version, by)])


def pinned(store: Store) -> dict[int, list[str]]:
    """Who pins which version."""
    pins: dict[int, list[str]] = {}
    for name in store.names(_PINS):
        version, _, by = name.partition("@")
        if version.isdecimal():
            pins.setdefault(int(version), []).append(unquote(by))
    return pins


def _pin_name(version: int, by: str) -> str:
    return f"{_PINS}/{version:010}@{quote(by, safe='')}"


def chain(version: int, bases: Mapping[int, int | None]) -> list[int]:
    """A version and what it rests on, given the base of every version that is not an anchor.

    >>> chain(12, {10: None, 11: 10, 12: 11})
    [12, 11, 10]
    """
    links = [version]
    while (base := bases.get(links[-1])) is not None:
        links.append(base)
    return links


def removable(bases: Mapping[int, int | None], keep: int, needed: Collection[int] = ()) -> list[int]:
    """Versions that neither the newest `keep` nor `needed` rest on, in the order to remove them.

    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2)
    [1, 0]
    >>> removable({0: None, 1: 0, 2: None, 3: 2, 4: 3}, keep=2, needed=[0])
    [1]
    """
    wanted: Iterable[int] = {*sorted(bases)[-max(keep, 1) :], *(set(needed) & bases.keys())}
    kept = {link for version in wanted for link in chain(version, bases)}
    return sorted(bases.keys() - kept, reverse=True)
