"""A whole state as one safetensors file: any tool opens it, and a late joiner starts from it.

Written and read here rather than by the safetensors library because both ends hash the bytes as they pass, one tensor
at a time, from or into memory that is there already.
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
    """The state as a safetensors file.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from safetensors.torch import load_file
    >>> from offbeat.storage.store import LocalStore
    >>> with tempfile.TemporaryDirectory() as place, LocalStore(Path(place)).create("x.safetensors") as writer:
    ...     write_anchor({"w": Bits.of(torch.tensor([1.5, 2.5]))}, writer)
    ...     load_file(f"{place}/x.safetensors")
    {'w': tensor([1.5000, 2.5000])}
    """
    # Wide elements first, as safetensors itself does: every tensor is then aligned.
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


def read_anchor(store: Store, manifest: VersionManifest, each: Callable[[], None]) -> dict[str, Bits]:
    """The state in a version's anchor, of which every byte was verified; `each` is called after each tensor."""
    file = manifest.anchor
    assert file is not None
    sha256 = hashlib.sha256()
    with store.open(file.name) as stream, ThreadPoolExecutor(1) as hashing:  # hash one tensor, read the next
        try:
            size = stream.read(8)
            text = stream.read(min(int.from_bytes(size, "little"), _HEADER_LIMIT))
            sha256.update(size + text)
            layout = _layout(text, manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(store, file.name, f"its header does not fit its manifest ({error})") from error
        state: dict[str, Bits] = {}
        for name in layout:
            entry = manifest.tensors[name]
            state[name] = Bits.empty(entry.dtype, entry.shape)
            _fill(state[name].raw(), stream, store, file.name)
            hashing.submit(sha256.update, state[name].raw())
            each()
        rest = stream.read(1)
    if rest or sha256.hexdigest() != file.sha256:
        raise _damaged(store, file.name, "its sha256 is not the one its manifest names")
    return {name: state[name] for name in manifest.tensors}


def _layout(text: bytes, manifest: VersionManifest) -> list[str]:
    """Names in the order of the file, where header and manifest tell the same."""
    header = json.loads(text)
    header.pop("__metadata__", None)
    if header.keys() != manifest.tensors.keys():
        raise ValueError("other tensors")
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    offset = 0
    for name in names:
        entry, found = manifest.tensors[name], header[name]
        start, end = found["data_offsets"]
        nbytes = Bits.nbytes(entry.dtype, entry.shape)
        if (found["dtype"], tuple(found["shape"]), start, end - start) != (entry.dtype, entry.shape, offset, nbytes):
            raise ValueError(f"{name} is described otherwise")
        offset = end
    return names


def _fill(into: memoryview, stream: BinaryIO, store: Store, name: str) -> None:
    position = 0
    while position < len(into):
        count = stream.readinto(into[position:])  # type: ignore[attr-defined]
        if not count:
            raise _damaged(store, name, "it ends too soon")
        position += count


def _damaged(store: Store, name: str, why: str) -> DamagedFile:
    return DamagedFile(
        f"the anchor {name} in {store.uri} is damaged: {why}. Nothing of it was used. Fetch another version, or have "
        f"the trainer publish again: a publisher begins with a new anchor"
    )
