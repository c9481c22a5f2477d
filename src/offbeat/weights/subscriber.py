"""The reader's side of the weight log. Readers may be anywhere, and the publisher does not know them.

    newest()        one listing: the newest complete version
    fetch(12)       patches on the state already held if that is the shortest way; else an anchor and later patches
    probe(12)       the log-probs against which an engine that loaded version 12 checks itself

A file is used only if its sha256 is right, and a state only if the fingerprint of every tensor is.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from offbeat.errors import DamagedFile, DamagedState, VersionMissing, WeightLogError, WrongBase
from offbeat.storage import open_store
from offbeat.storage.store import Store
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.anchor import read_anchor
from offbeat.weights.delta import Bits, apply
from offbeat.weights.manifest import CALIBRATION, FOLDER, VersionManifest, manifest_name, version_of
from offbeat.weights.probe import Probe
from offbeat.weights.retention import ReaderLease


@dataclass
class _Held:
    """A state in memory and its verified digest."""

    state: str
    tensors: dict[str, Bits]


@dataclass(frozen=True)
class Route:
    """How to reach a version: load the anchor of `start`, or keep the held state if it is None; then apply patches."""

    start: VersionManifest | None
    patches: tuple[VersionManifest, ...]


class Subscription(AbstractContextManager["Subscription"]):
    """Follows a weight log. Not thread-safe.

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
        """Follow the log at a local path or object-store URI, which need not exist yet. `name` appears in leases."""
        return cls(open_store(uri), name)

    def newest(self) -> int | None:
        """Return the newest complete version, or None if there is none yet."""
        return max(self.versions(), default=None)

    def versions(self) -> tuple[int, ...]:
        """Return all complete versions, in order."""
        self._lease.renew()
        return tuple(sorted(v for name in self._store.list_names(FOLDER) if (v := version_of(name)) is not None))

    def fetch(self, version: int, *, from_anchor: bool = False) -> Mapping[str, Tensor]:
        """Return the verified state of a version. `from_anchor` ignores the state already held.

        The tensors belong to the subscription: the next fetch changes them in place, so that memory holds one state.
        Clone them if you keep them longer or write to them.
        """
        self._lease.hold({version})  # before the first read, so that the publisher keeps the version
        target = self._manifest(version)
        if from_anchor:
            self._held = None
        held, self._held = self._held, None
        if held is None or held.state != target.state:
            route = self._route(target, held.state if held else None)
            if route.start is not None:
                held = None  # free it before the anchor is read
            held = self._follow(route, held)
        self._verify(target, held.tensors)
        self._held = _Held(target.state, held.tensors)
        return MappingProxyType({name: held.tensors[name].tensor() for name in target.tensors})

    def probe(self, version: int) -> Probe | None:
        """Return the probe of a version, or None if it has none. The probe of version 0 is kept forever."""
        manifest = self._manifest_or_calibration(version)
        return None if manifest.probe is None else Probe.from_json(manifest.probe)

    def adapter(self, version: int) -> AdapterSpec | None:
        """Return what the A and B of a version belong to, or None if its state is whole weights."""
        return self._manifest_or_calibration(version).adapter

    def close(self) -> None:
        """Release the lease and the state."""
        self._held = None
        self._pool.shutdown()
        self._lease.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _manifest(self, version: int) -> VersionManifest:
        name = manifest_name(version)
        try:
            manifest = VersionManifest.parse(self._store.read(name), name)
        except FileNotFoundError:
            raise self._missing(version) from None
        if manifest.version != version:
            raise DamagedFile(
                f"the manifest {name} describes version {manifest.version}: the file was renamed or replaced"
            )
        return manifest

    def _manifest_or_calibration(self, version: int) -> VersionManifest:
        try:
            return self._manifest(version)
        except VersionMissing:
            if version != 0:
                raise
        try:
            return VersionManifest.parse(self._store.read(CALIBRATION), CALIBRATION)
        except FileNotFoundError:
            raise self._missing(0) from None

    def _missing(self, version: int) -> VersionMissing:
        return VersionMissing(
            f"version {version} is not in {self._store.uri}, which holds {list(self.versions())}: it was removed, or "
            f"never published. Fetch the newest version"
        )

    def _file_missing(self, manifest: VersionManifest, what: str) -> WeightLogError:
        """Tell a version that was just retired from a file that was deleted on its own."""
        if manifest.version not in self.versions():
            return self._missing(manifest.version)
        return DamagedFile(
            f"the {what} of version {manifest.version} in {self._store.uri} is missing, although its manifest exists. "
            f"Restore {' or '.join(file.name for file in manifest.files)}, or fetch a later version with an anchor"
        )

    def _route(self, target: VersionManifest, held: str | None) -> Route:
        """Return the route that reads the fewest bytes."""
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
                base = self._manifest(step.base.version)
            except VersionMissing:
                break
            if base.sha256 != step.base.manifest:
                raise WrongBase(
                    f"{step.patch.name} was made for another version {base.version} than the one here: files of two "
                    f"logs were mixed. Fetch a later version with an anchor, or restart the trainer, which writes one"
                )
            step = base
        if best is None:
            raise VersionMissing(
                f"version {target.version} cannot be loaded from {self._store.uri}: versions it depends on are "
                f"missing. Fetch the newest version"
            )
        return best

    def _follow(self, route: Route, held: _Held | None) -> _Held:
        if route.start is not None:
            try:
                tensors = read_anchor(self._store, route.start, self._lease.renew)
            except FileNotFoundError:
                raise self._file_missing(route.start, "anchor") from None
            held = _Held(route.start.state, tensors)
        assert held is not None, "a route without a start begins at the held state"
        for manifest in route.patches:
            self._apply_patch(manifest, held)
        return held

    def _apply_patch(self, manifest: VersionManifest, held: _Held) -> None:
        file, base = manifest.patch, manifest.base
        assert file is not None and base is not None
        assert base.state == held.state, "the route passes through the base"
        try:
            content = self._store.read(file.name)
        except FileNotFoundError:
            raise self._file_missing(manifest, "patch") from None
        if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
            raise DamagedFile(
                f"the patch {file.name} in {self._store.uri} is damaged: its sha256 differs from the one in its "
                f"manifest. It was not used. Fetch a later version with an anchor"
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
                f"version {manifest.version}: {len(wrong)} tensors differ from what was published "
                f"({', '.join(wrong[:3])}…); your code wrote to them, or the memory is faulty. They were dropped; "
                f"fetch again"
            )
