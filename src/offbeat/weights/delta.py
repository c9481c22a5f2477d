"""Patches: a lossless code for which elements of a tensor changed between two states, and by how much, in bits.

A tensor is cut into chunks of `CHUNK` elements. Each chunk becomes one block:

    unchanged   0x00
    sparse      0x01  count u32  planes u8  length u32   zstd frame: the gaps' byte planes, then the differences'
    dense       0x02                        length u32   zstd frame: the new bit patterns' byte planes

A gap is the number of unchanged elements before a changed one. A difference is new − base of the bit patterns, as
integers modulo their width, in zigzag order (0, −1, 1, −2, … become 0, 1, 2, 3, …): a bf16 value that moves by one unit
in its last place gives 1 or 2 whatever its size. Byte planes are the first (least significant) bytes of all elements,
then the second bytes, and so on: the bytes of one plane resemble each other and compress well. Of the gaps only the
first `planes` are stored; the others are zero. Integers are little-endian.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from offbeat.errors import DamagedFile, WeightLogError

Words = NDArray[np.unsignedinteger]
"""A flat array with one unsigned integer for each element."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors files."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bits:
    """A tensor as bit patterns on the host.

    >>> bits = Bits.of(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    >>> bits.dtype, bits.shape, [hex(word) for word in bits.words]
    ('BF16', (2,), ['0x3f80', '0x8000'])
    """

    dtype: str
    shape: tuple[int, ...]
    words: Words

    @classmethod
    def of(cls, tensor: Tensor) -> "Bits":
        """Take the bits of a tensor. Shares its memory if it is on the host and contiguous; copies it otherwise."""
        if tensor.dtype not in _NAMES:
            raise WeightLogError(f"{tensor.dtype} cannot be published; convert it to one of {', '.join(DTYPES)}")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        words = flat.view(_SIGNED[flat.element_size()]).numpy()
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape), words.view(f"<u{flat.element_size()}"))

    @classmethod
    def empty(cls, dtype: str, shape: tuple[int, ...]) -> "Bits":
        """Allocate memory for a tensor without initializing it."""
        return cls(dtype, shape, np.empty(prod(shape), f"<u{DTYPES[dtype].itemsize}"))

    @staticmethod
    def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
        return prod(shape) * DTYPES[dtype].itemsize

    def tensor(self) -> Tensor:
        """Return the tensor. It shares memory with these bits."""
        signed = torch.from_numpy(self.words.view(f"<i{self.words.itemsize}"))
        return signed.view(DTYPES[self.dtype]).reshape(self.shape)

    def copy(self) -> "Bits":
        return Bits(self.dtype, self.shape, self.words.copy())

    def matches(self, other: "Bits") -> bool:
        """Return whether dtype and shape are the same."""
        return self.dtype == other.dtype and self.shape == other.shape

    def raw(self) -> memoryview:
        """Return the bytes, little-endian, in element order, without copying."""
        return self.words.view(np.uint8).data

    def fingerprint(self) -> str:
        """Return the XXH3-128 of the bits. It verifies memory; sha256 verifies files."""
        return xxh3_128(self.raw()).hexdigest()


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Return the sha256 of a whole state from the name, dtype, shape and fingerprint of its tensors, in any order.

    >>> state_digest([("b", "F32", (2, 3), "00"), ("a", "BF16", (), "11")])[:16]
    '374ff1183e266add'
    """
    rows = sorted(f"{name}\0{dtype}\0{'x'.join(map(str, shape))}\0{xxh3}\n" for name, dtype, shape, xxh3 in tensors)
    return hashlib.sha256("".join(rows).encode()).hexdigest()


CHUNK: Final = 1 << 20
"""Elements encoded at a time: small enough for the processor's caches, and a bound on memory."""
_UNCHANGED, _SPARSE, _DENSE = 0, 1, 2
_HEAD: Final = struct.Struct("<BIB")
_LENGTH: Final = struct.Struct("<I")
_LEVEL: Final = 1
"""zstd level. Level 9 saves 3 % of the bytes and takes ten times as long."""


def encode(base: Words | None, new: Words, *, advance: bool = False) -> tuple[bytes, int]:
    """Return the blocks that turn `base` into `new` (empty if nothing changed) and how many elements changed.

    Without a base, or with one of another width or length, every block is dense. With `advance` the changed elements
    are also written to `base`, which then equals `new`.

    >>> base = np.array([7, 8, 9, 10], np.uint16)
    >>> patch, changed = encode(base, np.array([7, 8, 10, 10], np.uint16))
    >>> apply(base, patch)
    >>> base.tolist(), changed
    ([7, 8, 10, 10], 1)
    """
    codec = pa.Codec("zstd", _LEVEL)
    if base is None or base.dtype != new.dtype or base.size != new.size:
        return b"".join(_dense(codec, chunk) for chunk in _chunks(new)), new.size
    blocks, changed = [], 0
    for before, after in zip(_chunks(base), _chunks(new), strict=True):
        where = changed_at(before, after)
        changed += where.size
        blocks.append(_block(codec, before, after, where))
        if advance:
            before[where] = after[where]
    return (b"".join(blocks) if changed else b""), changed


def apply(words: Words, patch: bytes) -> None:
    """Turn the base into the new bits, in place. The caller has verified the sha256 of `patch`.

    >>> words = np.array([1, 2, 3], np.uint32)
    >>> apply(words, encode(None, np.array([4, 5, 6], np.uint32))[0])
    >>> words.tolist()
    [4, 5, 6]
    """
    if not patch:
        return
    reader = _Reader(patch)
    try:
        for chunk in _chunks(words):
            _apply_block(chunk, reader)
    except (struct.error, OSError, ValueError, IndexError, OverflowError) as error:
        raise DamagedFile(f"a block of the patch cannot be decoded: {error}") from error
    if reader.position != len(patch):
        raise DamagedFile(f"the patch has {len(patch) - reader.position} bytes after its last block")


def changed_at(base: Words, new: Words) -> NDArray[np.int64]:
    """Return the positions at which bits differ.

    >>> changed_at(np.array([0, 1, 2], np.uint16), np.array([0, 1, 3], np.uint16)).tolist()
    [2]
    """
    # Few elements change, so compare eight bytes at a time, scan the results eight at a time, and look closer only
    # where they differ.
    shift = {1: 3, 2: 2, 4: 1, 8: 0}[base.itemsize]
    whole = base.size >> (shift + 3) << (shift + 3)
    base_eights, new_eights = base[:whole].view(np.uint64), new[:whole].view(np.uint64)
    differ = base_eights != new_eights
    groups = np.flatnonzero(differ.view(np.uint64) != 0)
    eights = _positions(groups, np.flatnonzero(differ.reshape(-1, 8).take(groups, axis=0)), 3)
    xor = base_eights.take(eights) ^ new_eights.take(eights)
    found = _positions(eights, np.flatnonzero(xor.view(base.dtype) != 0), shift)
    rest = np.flatnonzero(base[whole:] != new[whole:])
    return np.concatenate([found, rest + whole]) if rest.size else found


def _positions(groups: NDArray[np.int64], inside: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
    """Turn positions within selected groups of 2^shift elements into positions within the whole array."""
    return (groups.take(inside >> shift) << shift) + (inside & ((1 << shift) - 1))


def _chunks(words: Words) -> Iterator[Words]:
    return (words[start : start + CHUNK] for start in range(0, words.size, CHUNK))


def _block(codec: pa.Codec, base: Words, new: Words, where: NDArray[np.int64]) -> bytes:
    if not where.size:
        return bytes([_UNCHANGED])
    gaps = np.empty(where.size, "<u4")
    gaps[0] = where[0]
    np.subtract(where[1:], where[:-1] + 1, out=gaps[1:], casting="unsafe")
    planes = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    differences = _zigzag(new.take(where) - base.take(where))
    sparse = _HEAD.pack(_SPARSE, where.size, planes) + _frame(codec, (gaps, planes), (differences, new.itemsize))
    # The low bytes of weights are noise, so a dense block is never much below half of the raw size.
    if len(sparse) <= new.nbytes // 2:
        return sparse
    return min(sparse, _dense(codec, new), key=len)


def _dense(codec: pa.Codec, new: Words) -> bytes:
    return bytes([_DENSE]) + _frame(codec, (new, new.itemsize))


def _frame(codec: pa.Codec, *columns: tuple[Words, int]) -> bytes:
    """Compress the first byte planes of all columns together: one more call would cost more than it saves."""
    content = np.empty((sum(planes for _, planes in columns), columns[0][0].size), np.uint8)
    row = 0
    for numbers, planes in columns:
        content[row : row + planes] = numbers.view(np.uint8).reshape(-1, numbers.itemsize).T[:planes]
        row += planes
    frame: bytes = codec.compress(content, asbytes=True)
    return _LENGTH.pack(len(frame)) + frame


def _zigzag(difference: Words) -> Words:
    signed = difference.view(f"<i{difference.itemsize}")
    zigzag: Words = ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)
    return zigzag


def _unzigzag(zigzag: Words) -> Words:
    one = zigzag.dtype.type(1)
    difference: Words = (zigzag >> one) ^ (~(zigzag & one) + one)
    return difference


class _Reader:
    """Reads a patch from front to back."""

    def __init__(self, patch: bytes) -> None:
        self.position = 0
        self._patch = memoryview(patch)
        self._codec = pa.Codec("zstd")

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = form.unpack_from(self._patch, self.position)
        self.position += form.size
        return values

    def kind(self) -> int:
        return self._patch[self.position]

    def planes(self, count: int, planes: int) -> NDArray[np.uint8]:
        """Decompress the next frame, which holds `planes` byte planes of `count` elements."""
        (length,) = self.take(_LENGTH)
        frame = self._patch[self.position : self.position + length]
        self.position += length
        content = self._codec.decompress(frame, count * planes)
        return np.frombuffer(content, np.uint8).reshape(planes, count)


def _join_planes(planes: NDArray[np.uint8], width: int) -> Words:
    """Rebuild integers of `width` bytes from their first byte planes."""
    columns = np.zeros((planes.shape[1], width), np.uint8)
    columns[:, : len(planes)] = planes.T
    return columns.reshape(-1).view(f"<u{width}")


def _apply_block(chunk: Words, reader: _Reader) -> None:
    kind = reader.kind()
    if kind == _SPARSE:
        _, count, planes = reader.take(_HEAD)
        if not 0 < count <= chunk.size or not 1 <= planes <= 4:
            raise ValueError(f"{count} changes in {planes} planes for a chunk of {chunk.size}")
        content = reader.planes(count, planes + chunk.itemsize)
        where = np.cumsum(_join_planes(content[:planes], 4), dtype=np.int64) + np.arange(count)
        chunk[where] += _unzigzag(_join_planes(content[planes:], chunk.itemsize))
        return
    reader.position += 1
    if kind == _DENSE:
        chunk[:] = _join_planes(reader.planes(chunk.size, chunk.itemsize), chunk.itemsize)
    elif kind != _UNCHANGED:
        raise ValueError(f"block kind {kind} does not exist")
