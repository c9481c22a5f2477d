"""The reader's side of the weight log: any number of them, anywhere, none of which the publisher knows.

    newest()        one listing: the newest complete version
    fetch(12)       patches onto the state held, where that is the shortest way; else an anchor and the patches after it
    probe(12)       what an engine that loaded it checks itself against

A file is used once its sha256 was found right, a state once the fingerprint of every tensor was.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from torch import Tensor

from offbeat.errors import DamagedFile, DamagedState, VersionMissing, WeightLogError, WrongBase
from offbeat.storage.store import Store, open_store
from offbeat.weights.anchor import read_anchor
from offbeat.weights.delta import Bits, apply
from offbeat.weights.manifest import CALIBRATION, FOLDER, VersionManifest, manifest_name, version_of
from offbeat.weights.probe import Probe
from offbeat.weights.retention import ReaderLease


@dataclass
class _Held:
    """A state in memory and the digest it was verified to have."""

    state: str
    tensors: dict[str, Bits]


@dataclass(frozen=True)
class Route:
    """How to reach a version: load the anchor of the first manifest, or keep the state held; then apply patches."""

    start: VersionManifest | None
    patches: tuple[VersionManifest, ...]


class Subscription(AbstractContextManager["Subscription"]):
    """Follows a weight log. Used by one thread at a time.

    >>> import tempfile, torch
    >>> from offbeat.weights.publisher import WeightLog
    >>> with tempfile.TemporaryDirectory() as place, Subscription.open(place, name="worker 3") as reader:
    ...     before = reader.newest()
    ...     with WeightLog.open(place) as log:
    ...         _ = log.publish(0, [("w", torch.tensor([1.0, 2.0]))])
    ...         before, reader.newest(), reader.fetch(0)["w"]
    (None, 0, tensor([1., 2.]))
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._lease = ReaderLease(store, name, time.time)
        self._held: _Held | None = None
        threads = min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="verify")

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, name: str) -> "Subscription":
        """Follow the log at a local path or object-store URI, which need not exist yet. `name` is for people."""
        return cls(open_store(uri), name)

    def newest(self) -> int | None:
        """The newest complete version; None while there is none."""
        return max(self.versions(), default=None)

    def versions(self) -> tuple[int, ...]:
        """All complete versions."""
        self._lease.renew()
        return tuple(sorted(v for name in self._store.names(FOLDER) if (v := version_of(name)) is not None))

    def fetch(self, version: int, *, from_anchor: bool = False) -> Mapping[str, Tensor]:
        """The state of a version, verified. `from_anchor` rebuilds it whatever is held.

        The tensors belong to the subscription: the next fetch changes them in place, so that memory holds one state.
        Whoever keeps them longer, or writes to them, clones them.
        """
        self._lease.hold({version})  # before anything is read: from here on retention leaves it alone
        target = self._manifest(version)
        if from_anchor:
            self._held = None
        held, self._held = self._held, None
        if held is None or held.state != target.state:
            route = self._route(target, held.state if held else None)
            if route.start is not None:
                held = None  # memory holds one state
            held = self._follow(route, held)
        self._verify(target, held.tensors)
        self._held = _Held(target.state, held.tensors)
        return MappingProxyType({name: held.tensors[name].tensor() for name in target.tensors})

    def probe(self, version: int) -> Probe | None:
        """What was published with a version to check engines by; that of version 0 is kept for ever."""
        try:
            manifest = self._manifest(version)
        except VersionMissing:
            if version != 0:
                raise
            manifest = self._calibration()
        return None if manifest.probe is None else Probe.from_json(manifest.probe)

    def close(self) -> None:
        """Give up the lease and the state."""
        self._held = None
        self._pool.shutdown()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _manifest(self, version: int) -> VersionManifest:
        name = manifest_name(version)
        try:
            manifest = VersionManifest.parse(self._store.read(name), name)
        except FileNotFoundError:
            raise self._missing(version) from None
        if manifest.version != version:
            raise DamagedFile(f"the manifest {name} describes version {manifest.version}: files were mixed up")
        return manifest

    def _calibration(self) -> VersionManifest:
        try:
            return VersionManifest.parse(self._store.read(CALIBRATION), CALIBRATION)
        except FileNotFoundError:
            raise self._missing(0) from None

    def _missing(self, version: int) -> VersionMissing:
        return VersionMissing(
            f"version {version} is not in {self._store.uri}, which holds {list(self.versions())}: it was retired, or "
            f"never published. Fetch the newest"
        )

    def _gone(self, manifest: VersionManifest, what: str) -> WeightLogError:
        """A file is not there: its version was retired this moment, or somebody removed the file alone."""
        if manifest.version not in self.versions():
            return self._missing(manifest.version)
        return DamagedFile(
            f"the {what} of version {manifest.version} in {self._store.uri} is gone, although its manifest is there. "
            f"Restore {' or '.join(file.name for file in manifest.files)}, or fetch a version from an anchor after it"
        )

    def _route(self, target: VersionManifest, held: str | None) -> Route:
        """The way that reads the fewest bytes."""
        patches: list[VersionManifest] = []
        best: Route | None = None
        best_bytes = patch_bytes = 0
        step = target
        while True:
            if step.anchor and (best is None or patch_bytes + step.anchor.bytes < best_bytes):
                best, best_bytes = Route(step, tuple(reversed(patches))), patch_bytes + step.anchor.bytes
            if step.patch is None or step.base is None:
                break
            patches.append(step)
            patch_bytes += step.patch.bytes
            if best and patch_bytes >= best_bytes:
                break
            if step.base.state == held:
                return Route(None, tuple(reversed(patches)))
            try:
                below = self._manifest(step.base.version)
            except VersionMissing:
                break
            if below.sha256 != step.base.manifest:
                raise WrongBase(
                    f"{step.patch.name} was made on another version {below.version} than the one here: files of two "
                    f"logs were mixed. Fetch a version from an anchor after it, or have the trainer publish again"
                )
            step = below
        if best is None:
            raise VersionMissing(
                f"version {target.version} cannot be loaded from {self._store.uri}: the versions it rests on are gone. "
                f"Fetch the newest"
            )
        return best

    def _follow(self, route: Route, held: _Held | None) -> _Held:
        if route.start is not None:
            try:
                tensors = read_anchor(self._store, route.start, self._lease.renew)
            except FileNotFoundError:
                raise self._gone(route.start, "anchor") from None
            held = _Held(route.start.state, tensors)
        assert held is not None, "a route without a start leads from the state held"
        for manifest in route.patches:
            self._patch(manifest, held)
        return held

    def _patch(self, manifest: VersionManifest, held: _Held) -> None:
        """Apply one patch in place."""
        file, base = manifest.patch, manifest.base
        assert file is not None and base is not None
        assert base.state == held.state, "the route leads over the base"
        try:
            content = self._store.read(file.name)
        except FileNotFoundError:
            raise self._gone(manifest, "patch") from None
        if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
            raise DamagedFile(
                f"the patch {file.name} in {self._store.uri} is damaged: its sha256 is not the one its manifest names. "
                f"Nothing of it was used. Fetch a version from an anchor after it"
            )
        self._lease.renew()
        tensors = {}
        for name, entry in manifest.tensors.items():
            start, end = entry.patch or (0, 0)
            bits = held.tensors.get(name)
            if bits is None or (bits.dtype, bits.shape) != (entry.dtype, entry.shape):
                bits = Bits.empty(entry.dtype, entry.shape)
            apply(bits.words, content[start:end])
            tensors[name] = bits
        held.tensors = tensors
        held.state = manifest.state

    def _verify(self, manifest: VersionManifest, tensors: dict[str, Bits]) -> None:
        fingerprints = self._pool.map(lambda name: tensors[name].fingerprint(), manifest.tensors)
        wrong = [
            name
            for name, fingerprint in zip(manifest.tensors, fingerprints, strict=True)
            if fingerprint != manifest.tensors[name].xxh3
        ]
        if wrong:
            raise DamagedState(
                f"version {manifest.version}: {len(wrong)} tensors are not what was published ({', '.join(wrong[:3])}"
                f"…); somebody wrote to them, or the memory is faulty. They were dropped; fetch again"
            )
