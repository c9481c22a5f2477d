"""The publisher's side of the weight log.

    publish(12, state)
      stream     each tensor to the host → compared with the last published one → its blocks into the patch file
      anchor     every so often the whole state as well, as safetensors
      commit     the manifest, in one atomic step, once all files are on disk: version 12 exists
      retire     remove the versions that no reader needs

Tensors come one at a time, from any device. A few threads work on them, and their results are used in order. So the
device never holds a second state, and the host holds one copy, the last published state, and the few tensors at work.
A killed publisher leaves files that no manifest names, and the next publisher starts with an anchor.

To take versions back, their manifests move to superseded/. `drop_superseded` removes these, and all files that no
version names, once a later checkpoint is durable. Only `retire` removes a version at once.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from torch import Tensor

from offbeat.errors import VersionMissing, VersionTaken, WeightLogError
from offbeat.storage import open_store
from offbeat.storage.store import Store, Writer
from offbeat.weights import retention
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.anchor import write_anchor
from offbeat.weights.delta import Bits, encode
from offbeat.weights.inspection import find_problem, listed_versions, read_calibration, read_manifests, unusable
from offbeat.weights.manifest import CALIBRATION, SUPERSEDED, Base, File, TensorEntry, VersionManifest, manifest_name
from offbeat.weights.probe import Probe

State = Iterable[tuple[str, Tensor]]
"""Names and tensors, on any device. A tensor must not change until the last one has been taken."""
HostCopy = dict[str, Bits]
Entries = dict[str, TensorEntry]
Result = TypeVar("Result")
Kind = Literal["anchor", "patch", "repeated"]

KEEP: Final = 20
"""Versions that stay loadable by default."""
_AHEAD: Final = 256 << 20
"""Bytes of tensors that may queue behind a large one, so that the other threads stay busy."""


@dataclass(frozen=True)
class Published:
    """The result of a publish."""

    version: int
    kind: Kind
    """`repeated`: the log already held this state under this number, and nothing was written."""
    state: str
    """The digest of the state."""
    bytes: int = 0
    """Total written: patch, anchor and manifest."""
    patch_bytes: int = 0
    changed: int = 0
    """Elements whose bits differ from the base; 0 without a base."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase: stream, anchor, commit, retire."""


class _PhaseTimer:
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
    >>> with tempfile.TemporaryDirectory() as folder, WeightLog.open(folder) as log:
    ...     first = log.publish(0, [("w", torch.zeros(1000, dtype=torch.bfloat16))])
    ...     second = log.publish(1, [("w", torch.eye(1000, dtype=torch.bfloat16)[0])])
    ...     first.kind, second.kind, second.changed, log.versions()
    ('anchor', 'patch', 1, (0, 1))
    """

    def __init__(self, store: Store, *, anchor_every: int, keep: int, adapter: AdapterSpec | None = None) -> None:
        self._store = store
        self._adapter = adapter
        self._anchor_every = anchor_every
        self._keep = keep
        self._held: HostCopy | None = None
        """The state of the newest version; None if this publisher does not have it."""
        self._since_anchor = 0
        self._claim = store.claim()
        try:
            self._manifests, damaged = read_manifests(store)
            self._remove([*damaged], "damaged")  # readers would take the newest one for a version
        except BaseException as error:
            self._claim.release()
            if isinstance(error, OSError):
                raise unusable(store, error) from error
            raise
        self._threads = min(16, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="publish")

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, anchor_every: int = 20, keep: int = KEEP,
             adapter: AdapterSpec | None = None) -> "WeightLog":  # fmt: skip
        """Become the publisher of the log at a local path or object-store URI. Creates the log if it is missing.

        An anchor is written with every `anchor_every`-th version and with the first of each publisher. The newest
        `keep` versions stay loadable, and so do all versions that readers or pins need. If the states are an `adapter`,
        every version is an anchor: it is small, and AdamW changes almost every value of it.
        """
        if anchor_every < 1 or keep < 1:
            raise WeightLogError(f"anchor_every = {anchor_every}, keep = {keep}: both must be at least 1")
        return cls(open_store(uri), anchor_every=anchor_every, keep=keep, adapter=adapter)

    def publish(self, version: int, state: State, probe: Probe | None = None) -> Published:
        """Make this state the newest version. When this returns, it is durable and readers see it.

        Publishing the same state again under the same number changes nothing, so a resumed trainer may repeat its
        steps.
        """
        self._forget_lost()
        if version in self._manifests:
            return self._repeat(version, state)
        newest = max(self._manifests, default=None)
        if version < 0 or (newest is not None and version < newest):
            raise VersionTaken(
                f"version {version} cannot be published after version {newest}: numbers start at 0 and only grow. To "
                f"continue from an earlier step, call rewind() with that step first"
            )
        self._claim.check()
        timer = _PhaseTimer()
        base = self._manifests[newest] if newest is not None else None
        manifest, held, changed = self._write_files(version, state, base, probe, timer)
        manifest_bytes = self._commit(manifest)
        self._held = held
        self._since_anchor = 0 if manifest.anchor else self._since_anchor + 1
        timer.end("commit")
        self.retire()
        timer.end("retire")
        kind: Kind = "anchor" if manifest.anchor else "patch"
        written = sum(file.bytes for file in manifest.files) + manifest_bytes
        patched = manifest.patch.bytes if manifest.patch else 0
        return Published(version, kind, manifest.state, written, patched, changed, timer.seconds)

    def versions(self) -> tuple[int, ...]:
        """Return the versions that readers can load, in order."""
        return tuple(self._manifests)

    def pin(self, version: int, by: str) -> None:
        """Keep a version and the versions it depends on until `unpin`. Checkpoints use this."""
        if version not in self._manifests:
            raise VersionMissing(f"version {version} cannot be pinned: the log holds {list(self._manifests)}")
        retention.pin(self._store, version, by)

    def unpin(self, version: int, by: str) -> None:
        """Remove the pin of this name; harmless if there is none."""
        retention.unpin(self._store, version, by)

    def retire(self) -> list[int]:
        """Remove the versions that no reader and no pin needs, and return them. `publish` does this each time."""
        bases = {v: m.base.version if m.base and not m.anchor else None for v, m in self._manifests.items()}
        if not retention.removable(bases, self._keep):
            return []
        needed = retention.leased(self._store, time.time(), bases) | retention.pinned(self._store).keys()
        return self._remove(retention.removable(bases, self._keep, needed))

    def find_problem(self, version: int) -> str | None:
        """Return why readers cannot load a version, or None if they can."""
        return find_problem(self._store, self._manifests, version)

    def remove_damaged(self) -> list[int]:
        """Set aside every version that readers cannot load, and return them. What is left is whole."""
        broken = [v for v in self._manifests if find_problem(self._store, self._manifests, v) is not None]
        self._held = None
        return self._remove(sorted(broken, reverse=True), "damaged")

    @property
    def calibration(self) -> Probe | None:
        """The probe of version 0, which every engine that starts is checked with; None if it is lost."""
        kept = read_calibration(self._store)
        return None if kept is None else Probe.from_json(kept.probe)

    def calibrate(self, state: State, probe: Probe) -> None:
        """Write the probe of version 0 again, given the state of version 0, which is not published.

        A log whose version 0 has another state is of another run: all its versions are set aside.
        """
        lost = File("data/removed", 0, "")  # as after version 0 is retired
        manifest = VersionManifest.made(
            0, dict(self._map(_describe, state)), anchor=lost, probe=probe, adapter=self._adapter
        )
        if self.state_of(0) not in (None, manifest.state):
            self.rewind(-1)
        self._store.put(CALIBRATION, manifest.serialize())

    def state_of(self, version: int) -> str | None:
        """Return the digest of a version's state; None if the log does not hold it."""
        return self._manifests[version].state if version in self._manifests else None

    def rewind(self, version: int) -> list[int]:
        """Set aside every version after this one, for a run that resumes from an earlier step, and return them."""
        self._held = None
        return self._remove(sorted((v for v in self._manifests if v > version), reverse=True), "rewound")

    def drop_superseded(self) -> None:
        """Remove what was set aside, and files that no version names. Call it when a later checkpoint is durable."""
        self._claim.check()
        manifests, damaged = read_manifests(self._store)
        if not damaged:  # else nobody knows which files they name
            named = {file.name for manifest in manifests.values() for file in manifest.files}
            self._store.remove(f"{SUPERSEDED}/{name}" for name in self._store.list_names(SUPERSEDED))
            self._store.remove(name for file in self._store.list_names("data") if (name := f"data/{file}") not in named)

    def close(self) -> None:
        """Let another process publish."""
        self._pool.shutdown()
        self._claim.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_files(
        self, version: int, state: State, base: VersionManifest | None, probe: Probe | None, timer: _PhaseTimer
    ) -> tuple[VersionManifest, HostCopy, int]:
        """Write all files of a version except its manifest."""
        stem = f"data/{version:010}-{secrets.token_hex(4)}"
        held, self._held = self._held, None  # if anything below fails, the next publish starts without a base
        patch, base_of_patch, changed = None, None, 0
        if held is None or base is None or self._adapter is not None:
            held, entries = self._copy(state)
        else:
            base_of_patch = Base(base.version, base.state, base.sha256)
            with self._store.create(name := f"{stem}.patch") as writer:
                entries, changed = self._advance(held, state, writer)
                patch = File(name, *writer.finished())
        timer.end("stream")
        anchor = None
        if patch is None or self._since_anchor + 1 >= self._anchor_every:
            with self._store.create(name := f"{stem}.safetensors") as writer:
                write_anchor(held, writer)
                anchor = File(name, *writer.finished())
        timer.end("anchor")
        manifest = VersionManifest.made(
            version, entries, base=base_of_patch, patch=patch, anchor=anchor, probe=probe, adapter=self._adapter
        )
        return manifest, held, changed

    def _forget_lost(self) -> None:
        """Notice versions that were removed by others since they were published: the next one needs an anchor."""
        present = set(listed_versions(self._store))
        for version in self._manifests.keys() - present:
            del self._manifests[version]
            self._held = None

    def _commit(self, manifest: VersionManifest) -> int:
        content = manifest.serialize()
        if manifest.version == 0:
            self._store.put(CALIBRATION, content)
        self._claim.check()
        self._store.put(manifest_name(manifest.version), content)
        self._manifests[manifest.version] = manifest
        return len(content)

    def _repeat(self, version: int, state: State) -> Published:
        new = VersionManifest.made(version, dict(self._map(_describe, state))).state
        published = self._manifests[version].state
        if new != published:
            raise VersionTaken(
                f"version {version} is in the log with another state ({published[:12]}, this one is {new[:12]}). To "
                f"continue from an earlier step, call rewind() with that step first"
            )
        return Published(version, "repeated", published)

    def _remove(self, versions: list[int], aside: str = "") -> list[int]:
        """Remove manifests, dependents first, then their files. With `aside`, only move manifests to superseded/."""
        if versions:
            self._claim.check()
            files = [file.name for version in versions if not aside for file in self._manifests[version].files]
            try:
                for version in versions:
                    name = manifest_name(version)
                    if aside:
                        with suppress(FileNotFoundError, IsADirectoryError):
                            content = self._store.read(name)
                            self._store.put(f"{SUPERSEDED}/{time.time_ns()}-{aside}-{version:010}.json", content)
                    self._store.remove([name])
                    self._manifests.pop(version, None)
                self._store.remove(files)
            except OSError as error:
                raise unusable(self._store, error) from error
        return versions

    def _copy(self, state: State) -> tuple[HostCopy, Entries]:
        """Copy the state to the host and fingerprint each tensor."""

        def work(_: str, bits: Bits) -> tuple[Bits, str]:
            return bits.copy(), bits.fingerprint()

        copy: HostCopy = {}
        entries: Entries = {}
        for name, (bits, fingerprint) in self._map(work, state):
            copy[name] = bits
            entries[name] = TensorEntry(bits.dtype, bits.shape, fingerprint, None)
        return copy, entries

    def _advance(self, copy: HostCopy, state: State, patch: Writer) -> tuple[Entries, int]:
        """Bring the copy up to the state, write the changes to the patch, and count the changed elements.

        If this raises, the copy is a mixture of both states.
        """

        def work(name: str, bits: Bits) -> tuple[Bits, str, bytes, int]:
            base = copy.get(name)
            if base is None or not base.matches(bits):
                blocks, changed = encode(None, bits.words)
                base = bits.copy()
            else:
                blocks, changed = encode(base.words, bits.words, advance=True)
            return base, bits.fingerprint(), blocks, changed

        entries: Entries = {}
        total_changed = position = 0
        for name, (bits, fingerprint, blocks, changed) in self._map(work, state):
            copy[name] = bits
            patch.write(blocks)
            entries[name] = TensorEntry(bits.dtype, bits.shape, fingerprint, (position, position + len(blocks)))
            position += len(blocks)
            total_changed += changed
        for removed in copy.keys() - entries.keys():
            del copy[removed]
        return entries, total_changed

    def _map(self, work: Callable[[str, Bits], Result], state: State) -> Iterator[tuple[str, Result]]:
        """Apply `work` to each tensor in threads and yield the results in order. Only this thread iterates `state`."""
        pending: deque[tuple[str, int, Future[Result]]] = deque()
        seen: set[str] = set()
        ahead = 0
        for name, tensor in state:
            if name in seen or "\0" in name or "\n" in name:
                raise WeightLogError(
                    f"{name!r} is not a valid tensor name: it occurs twice, or has a line break or NUL"
                )
            seen.add(name)
            bits = Bits.of(tensor)
            pending.append((name, bits.words.nbytes, self._pool.submit(work, name, bits)))
            ahead += bits.words.nbytes
            while len(pending) > 2 * self._threads and ahead > _AHEAD:
                first, nbytes, result = pending.popleft()
                ahead -= nbytes
                yield first, result.result()
        for name, _, result in pending:
            yield name, result.result()


def _describe(_: str, bits: Bits) -> TensorEntry:
    return TensorEntry(bits.dtype, bits.shape, bits.fingerprint(), None)
