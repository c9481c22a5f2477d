"""The publisher's side of the weight log.

    publish(12, state)
      stream     each tensor to the host → compared with the last published one → its blocks into the patch file
      anchor     every so often the whole state as well, as safetensors
      commit     the manifest, in one atomic step, once all files are on disk: version 12 exists
      retire     versions that nobody needs

The host holds one copy of the state, the last published one, and changes it tensor by tensor. A publisher that was
killed leaves files that no manifest names; the next one removes them and begins with an anchor.
"""

import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from offbeat.errors import VersionMissing, VersionTaken, WeightLogError
from offbeat.storage.store import Store, open_store
from offbeat.weights import retention as leases
from offbeat.weights.anchor import write_anchor
from offbeat.weights.host_copy import Entries, HostCopy, State, advanced, described, taken
from offbeat.weights.manifest import CALIBRATION, FOLDER, Base, File, VersionManifest, manifest_name, version_of
from offbeat.weights.probe import Probe
from offbeat.weights.retention import removable

Kind = Literal["anchor", "patch", "repeated"]


@dataclass(frozen=True)
class Published:
    """What a publish did."""

    version: int
    kind: Kind
    """`repeated`: this very state was there already under this number, and nothing was written."""
    state: str
    """The digest of the state."""
    bytes: int = 0
    """Written in all: patch, anchor, manifest."""
    patch_bytes: int = 0
    changed: int = 0
    """Elements whose bits differ from the base's; 0 without a base."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase: stream, anchor, commit, retire."""


class _Phases:
    """How long each part took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._since
        self._since = now


class WeightLog(AbstractContextManager["WeightLog"]):
    """Publishes numbered states of a policy. One publisher at a time; readers are `Subscription`s.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as place, WeightLog.open(place) as log:
    ...     first = log.publish(0, [("w", torch.zeros(1000, dtype=torch.bfloat16))])
    ...     second = log.publish(1, [("w", torch.eye(1000, dtype=torch.bfloat16)[0])])
    ...     first.kind, second.kind, second.changed, log.versions()
    ('anchor', 'patch', 1, (0, 1))
    """

    def __init__(self, store: Store, *, anchor_every: int, keep: int) -> None:
        self._store = store
        self._anchor_every = anchor_every
        self._keep = keep
        self._held: HostCopy | None = None
        """The state of the newest version; None where this publisher does not have it."""
        self._since_anchor = 0
        self._claim = store.claim()
        try:
            self._manifests = _manifests(store)
            named = {file.name for manifest in self._manifests.values() for file in manifest.files}
            store.remove(name for one in store.names("data") if (name := f"data/{one}") not in named)
        except BaseException:
            self._claim.release()
            raise
        self._threads = min(16, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="publish")

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, anchor_every: int = 20, keep: int = 20) -> "WeightLog":
        """Become the publisher of the log at a local path or object-store URI; it is made where there is none.

        An anchor is written with every `anchor_every`-th version and with the first of each publisher. The newest
        `keep` versions stay loadable, and what readers or pins need beyond them.
        """
        if anchor_every < 1 or keep < 1:
            raise WeightLogError(f"anchor_every = {anchor_every}, keep = {keep}: both must be at least 1")
        return cls(open_store(uri), anchor_every=anchor_every, keep=keep)

    def publish(self, version: int, state: State, probe: Probe | None = None) -> Published:
        """Make this state the log's newest version. When this returns it is durable and readers see it.

        The same state under a number that is there already is accepted and changes nothing, so that a trainer that
        resumed may repeat its steps.
        """
        if version in self._manifests:
            return self._repeated(version, state)
        newest = max(self._manifests, default=None)
        if version < 0 or (newest is not None and version < newest):
            raise VersionTaken(
                f"version {version} cannot be published after version {newest}: numbers start at 0 and only grow. A "
                f"trainer that goes on from an earlier step calls rewind() with that step first"
            )
        self._claim.check()
        phases = _Phases()
        base = self._manifests[newest] if newest is not None else None
        manifest, held, changed = self._files(version, state, base, probe, phases)
        manifest_bytes = self._commit(manifest)
        self._held = held
        self._since_anchor = 0 if manifest.anchor else self._since_anchor + 1
        phases.end("commit")
        self.retire()
        phases.end("retire")
        return Published(
            version,
            "anchor" if manifest.anchor else "patch",
            manifest.state,
            bytes=sum(file.bytes for file in manifest.files) + manifest_bytes,
            patch_bytes=manifest.patch.bytes if manifest.patch else 0,
            changed=changed,
            seconds=phases.seconds,
        )

    def versions(self) -> tuple[int, ...]:
        """What can be loaded."""
        return tuple(self._manifests)

    def pin(self, version: int, by: str) -> None:
        """Keep a version, and what it rests on, until `unpin`: for checkpoints."""
        if version not in self._manifests:
            raise VersionMissing(f"version {version} cannot be pinned: the log holds {list(self._manifests)}")
        leases.pin(self._store, version, by)

    def unpin(self, version: int, by: str) -> None:
        """Give back what was pinned under this name; harmless where nothing was."""
        leases.unpin(self._store, version, by)

    def retire(self) -> list[int]:
        """Remove the versions that nobody needs; returns which. `publish` does this each time."""
        bases = {v: m.base.version if m.base and not m.anchor else None for v, m in self._manifests.items()}
        if not removable(bases, self._keep):
            return []
        needed = leases.leased(self._store, time.time(), bases) | leases.pinned(self._store).keys()
        return self._remove(removable(bases, self._keep, needed))

    def rewind(self, version: int) -> list[int]:
        """Take back every version after this one, for a run that goes on from an earlier step; returns which."""
        self._held = None
        return self._remove(sorted((v for v in self._manifests if v > version), reverse=True))

    def close(self) -> None:
        """Stop being the publisher."""
        self._pool.shutdown()
        self._claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _files(
        self, version: int, state: State, base: VersionManifest | None, probe: Probe | None, phases: _Phases
    ) -> tuple[VersionManifest, HostCopy, int]:
        """Write all of a version but its manifest."""
        stem = f"data/{version:010}-{secrets.token_hex(4)}"
        held, self._held = self._held, None  # whatever fails below, the next publish starts from nothing
        patch, on, changed = None, None, 0
        if held is None or base is None:
            held, entries = taken(state, self._pool, self._threads)
        else:
            on = Base(base.version, base.state, base.sha256)
            patch, entries, changed = self._patch(held, state, f"{stem}.patch")
        phases.end("stream")
        anchor = None
        if patch is None or self._since_anchor + 1 >= self._anchor_every:
            anchor = self._anchor(held, f"{stem}.safetensors")
        phases.end("anchor")
        return VersionManifest.made(version, entries, base=on, patch=patch, anchor=anchor, probe=probe), held, changed

    def _patch(self, held: HostCopy, state: State, name: str) -> tuple[File, Entries, int]:
        with self._store.create(name) as writer:
            entries, changed = advanced(held, state, writer, self._pool, self._threads)
            return File(name, *writer.finished()), entries, changed

    def _anchor(self, held: HostCopy, name: str) -> File:
        with self._store.create(name) as writer:
            write_anchor(held, writer)
            return File(name, *writer.finished())

    def _commit(self, manifest: VersionManifest) -> int:
        content = manifest.serialise()
        if manifest.version == 0:
            self._store.put(CALIBRATION, content)
        self._claim.check()
        self._store.put(manifest_name(manifest.version), content)
        self._manifests[manifest.version] = manifest
        return len(content)

    def _repeated(self, version: int, state: State) -> Published:
        entries = described(state, self._pool, self._threads)
        found, there = VersionManifest.made(version, entries).state, self._manifests[version].state
        if found != there:
            raise VersionTaken(
                f"version {version} is in the log with another state ({there[:12]}, this one is {found[:12]}). A "
                f"trainer that goes on from an earlier step calls rewind() with that step first"
            )
        return Published(version, "repeated", there)

    def _remove(self, versions: list[int]) -> list[int]:
        """Manifests first, dependents before what they rest on; then the files that no manifest names any more."""
        if versions:
            self._claim.check()
            files = [file.name for version in versions for file in self._manifests[version].files]
            for version in versions:
                self._store.remove([manifest_name(version)])
                del self._manifests[version]
            self._store.remove(files)
        return versions


def _manifests(store: Store) -> dict[int, VersionManifest]:
    versions = sorted(v for name in store.names(FOLDER) if (v := version_of(name)) is not None)
    return {v: VersionManifest.parse(store.read(manifest_name(v)), manifest_name(v)) for v in versions}
