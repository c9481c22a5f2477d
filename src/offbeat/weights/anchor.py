"""Anchors: a whole state as one safetensors file, which any tool opens and from which a new reader starts.

This module reads and writes the format itself, without the safetensors library, because both ends hash the bytes as
they pass, one tensor at a time, using memory that is already allocated.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Final

from offbeat.errors import DamagedFile
from offbeat.storage.store import Store, Writer
from offbeat.weights.delta import Bits
from offbeat.weights.manifest import VersionManifest

_HEADER_LIMIT: Final = 100 << 20


def write_anchor(state: Mapping[str, Bits], writer: Writer) -> None:
    """Write the state as a safetensors file.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file
    >>> from offbeat.storage.store import LocalStore
    >>> with tempfile.TemporaryDirectory() as place, LocalStore(Path(place)).create("x.safetensors") as writer:
    ...     write_anchor({"w": Bits.of(torch.tensor([1.5, 2.5]))}, writer)
    ...     load_file(f"{place}/x.safetensors")
    {'w': tensor([1.5000, 2.5000])}
    """
    # Wide elements first, as safetensors itself does, so that every tensor is aligned.
    ordered = sorted(state.items(), key=lambda item: (-item[1].words.itemsize, item[0]))
    header, offset = {}, 0
    for name, bits in ordered:
        end = offset + bits.words.nbytes
        header[name] = {"dtype": bits.dtype, "shape": list(bits.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    writer.write(len(text).to_bytes(8, "little") + text)
    for _, bits in ordered:
        writer.write(bits.raw())


def read_anchor(store: Store, manifest: VersionManifest, on_tensor: Callable[[], None]) -> dict[str, Bits]:
    """Read the state in a version's anchor and verify every byte. Calls `on_tensor` after each tensor."""
    file = manifest.anchor
    assert file is not None
    sha256 = hashlib.sha256()
    with store.open(file.name) as stream, ThreadPoolExecutor(1) as hashing:  # hash one tensor while reading the next
        try:
            size = stream.read(8)
            text = stream.read(min(int.from_bytes(size, "little"), _HEADER_LIMIT))
            sha256.update(size + text)
            layout = _layout(text, manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(store, file.name, f"its header does not match its manifest ({error})") from error
        state: dict[str, Bits] = {}
        for name in layout:
            entry = manifest.tensors[name]
            state[name] = Bits.empty(entry.dtype, entry.shape)
            _fill(state[name].raw(), stream, store, file.name)
            hashing.submit(sha256.update, state[name].raw())
            on_tensor()
        rest = stream.read(1)
    if rest or sha256.hexdigest() != file.sha256:
        raise _damaged(store, file.name, "its sha256 differs from the one in its manifest")
    return {name: state[name] for name in manifest.tensors}


def _layout(text: bytes, manifest: VersionManifest) -> list[str]:
    """Return the names in file order; raises ValueError if header and manifest differ."""
    header = json.loads(text)
    header.pop("__metadata__", None)
    if header.keys() != manifest.tensors.keys():
        raise ValueError("it holds other tensors")
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    offset = 0
    for name in names:
        entry, found = manifest.tensors[name], header[name]
        start, end = found["data_offsets"]
        nbytes = Bits.nbytes(entry.dtype, entry.shape)
        if (found["dtype"], tuple(found["shape"]), start, end - start) != (entry.dtype, entry.shape, offset, nbytes):
            raise ValueError(f"{name} has another dtype, shape or place")
        offset = end
    return names


def _fill(into: memoryview, stream: BinaryIO, store: Store, name: str) -> None:
    position = 0
    while position < len(into):
        count = stream.readinto(into[position:])  # type: ignore[attr-defined]
        if not count:
            raise _damaged(store, name, "it is too short")
        position += count


def _damaged(store: Store, name: str, why: str) -> DamagedFile:
    return DamagedFile(
        f"the anchor {name} in {store.uri} is damaged: {why}. It was not used. Fetch another version, or restart the "
        f"trainer: a new publisher starts with a new anchor"
    )
