"""The manifest of a version: a small file that is written last and makes the version exist.

The first line of the file is the sha256 of everything after that line; the rest is JSON. A manifest that does not
match its first line is not used. It names its files by their sha256 and its base's manifest by that first line. So the
sha256 of one manifest covers every byte of every file that its state needs, back to the anchor.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from offbeat.errors import DamagedFile, ProbeError
from offbeat.types import Json
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.delta import DTYPES, state_digest
from offbeat.weights.probe import Probe

FORMAT: Final = "offbeat-weights/1"
FOLDER: Final = "versions"
CALIBRATION: Final = "calibration.json"
"""A second copy of version 0's manifest, kept for its probe after the version itself is removed."""
SUPERSEDED: Final = "superseded"
"""The folder of manifests that were taken back, until a later checkpoint is durable."""


def manifest_name(version: int) -> str:
    """Return the file name of a version's manifest. Names sort in version order.

    >>> manifest_name(12)
    'versions/0000000012.json'
    """
    return f"{FOLDER}/{version:010}.json"


def version_of(name: str) -> int | None:
    """Return the version whose manifest has this file name, or None for other files.

    >>> version_of("0000000012.json"), version_of("notes.txt")
    (12, None)
    """
    stem = name.removesuffix(".json")
    return int(stem) if stem != name and len(stem) >= 10 and stem.isdecimal() else None


@dataclass(frozen=True)
class File:
    """A file of a version, identified by its content."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the resulting state."""

    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    patch: tuple[int, int] | None
    """Bytes [start, end) of the patch that hold its blocks; empty if nothing changed. None without a patch."""


@dataclass(frozen=True)
class Base:
    """The state to which a patch applies."""

    version: int
    state: str
    manifest: str
    """The sha256 of the base's manifest."""


@dataclass(frozen=True)
class VersionManifest:
    """A version: an anchor, a patch with its base, or both, and the state they result in.

    >>> anchor = File("data/a.safetensors", 120, "00" * 32)
    >>> manifest = VersionManifest.made(3, {"w": TensorEntry("BF16", (4,), "11" * 32, None)}, anchor=anchor)
    >>> VersionManifest.parse(manifest.serialize(), "versions/0000000003.json") == manifest
    True
    """

    version: int
    state: str
    tensors: Mapping[str, TensorEntry]
    base: Base | None = None
    patch: File | None = None
    anchor: File | None = None
    probe: Json = None
    adapter: AdapterSpec | None = None
    """Set if the state is an adapter's A and B; None for whole weights."""
    sha256: str = ""
    """The first line of the file."""

    @classmethod
    def made(
        cls,
        version: int,
        tensors: Mapping[str, TensorEntry],
        *,
        base: Base | None = None,
        patch: File | None = None,
        anchor: File | None = None,
        probe: Probe | None = None,
        adapter: AdapterSpec | None = None,
    ) -> "VersionManifest":
        """Build a manifest and compute its digests."""
        state = state_digest((name, t.dtype, t.shape, t.xxh3) for name, t in tensors.items())
        manifest = cls(version, state, tensors, base, patch, anchor, probe.to_json() if probe else None, adapter)
        return replace(manifest, sha256=hashlib.sha256(manifest._body()).hexdigest())

    @property
    def files(self) -> list[File]:
        """The files that belong to this version alone, without those of its base."""
        return [file for file in (self.patch, self.anchor) if file is not None]

    def serialize(self) -> bytes:
        return self.sha256.encode() + b"\n" + self._body()

    def _body(self) -> bytes:
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "state": self.state,
                "base": vars(self.base) if self.base else None,
                "patch": vars(self.patch) if self.patch else None,
                "anchor": vars(self.anchor) if self.anchor else None,
                "tensors": {name: vars(entry) for name, entry in self.tensors.items()},
                "probe": self.probe,
                "adapter": self.adapter.to_json() if self.adapter else None,
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()

    @classmethod
    def parse(cls, content: bytes, name: str) -> "VersionManifest":
        """Read what `serialize` wrote; raises `DamagedFile` if a byte differs. `name` is for the message."""
        first, _, body = content.partition(b"\n")
        if first != hashlib.sha256(body).hexdigest().encode():
            raise _damaged(name, "its first line is not the sha256 of the rest")
        try:
            return replace(cls._from_json(json.loads(body)), sha256=first.decode())
        except (ValueError, KeyError, TypeError, AttributeError, ProbeError) as error:
            raise _damaged(name, f"it does not describe a version ({error!r})") from error

    @classmethod
    def _from_json(cls, data: dict[str, Json]) -> "VersionManifest":
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
        entries = cast("dict[str, dict[str, Json]]", data["tensors"])
        tensors = {name: _tensor_entry(entry) for name, entry in entries.items()}
        adapter = data.get("adapter")  # earlier releases have no adapters
        base, patch, anchor = (cast("dict[str, Json] | None", data[key]) for key in ("base", "patch", "anchor"))
        manifest = cls(
            version=int(cast("int", data["version"])),
            state=str(data["state"]),
            tensors=tensors,
            base=_base(base) if base else None,
            patch=_file(patch) if patch else None,
            anchor=_file(anchor) if anchor else None,
            probe=data["probe"],
            adapter=AdapterSpec.from_json(adapter) if adapter else None,
        )
        if manifest.anchor is None and (manifest.patch is None or manifest.base is None):
            raise ValueError("it has neither an anchor nor a patch with a base")
        if manifest.state != state_digest((name, t.dtype, t.shape, t.xxh3) for name, t in tensors.items()):
            raise ValueError("its tensors do not match its state digest")
        return manifest


def _tensor_entry(entry: dict[str, Json]) -> TensorEntry:
    shape = tuple(int(size) for size in cast("list[int]", entry["shape"]))
    dtype = str(entry["dtype"])
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    patch = cast("list[int] | None", entry["patch"])
    return TensorEntry(dtype, shape, str(entry["xxh3"]), (int(patch[0]), int(patch[1])) if patch else None)


def _base(entry: dict[str, Json]) -> Base:
    return Base(int(cast("int", entry["version"])), str(entry["state"]), str(entry["manifest"]))


def _file(entry: dict[str, Json]) -> File:
    return File(str(entry["name"]), int(cast("int", entry["bytes"])), str(entry["sha256"]))


def _damaged(name: str, why: str) -> DamagedFile:
    return DamagedFile(
        f"the manifest {name} is damaged: {why}. Restore it from a copy, or remove it: this version is then lost, and "
        f"readers load later versions from the next anchor"
    )
