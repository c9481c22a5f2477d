"""Tensors as bit patterns: what is compared, encoded, hashed and stored is never a number, always its bits.

NaN payloads, -0 and denormals are thereby kept, and every dtype is treated alike.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from offbeat.weights.errors import WeightLogError

Words = NDArray[np.unsignedinteger]
"""One unsigned integer for each element, in a row."""

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
"""Dtypes under the names that safetensors files use."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bits:
    """A tensor's bits on the host.

    >>> bits = Bits.of(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    >>> bits.dtype, bits.shape, [hex(word) for word in bits.words]
    ('BF16', (2,), ['0x3f80', '0x8000'])
    """

    dtype: str
    shape: tuple[int, ...]
    words: Words

    @classmethod
    def of(cls, tensor: Tensor) -> "Bits":
        """Brought to the host where it is elsewhere; shares memory where it is there already."""
        if tensor.dtype not in _NAMES:
            raise WeightLogError(f"{tensor.dtype} cannot be published; convert it to one of {', '.join(DTYPES)}")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        words = flat.view(_SIGNED[flat.element_size()]).numpy()
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape), words.view(f"<u{flat.element_size()}"))

    @classmethod
    def empty(cls, dtype: str, shape: tuple[int, ...]) -> "Bits":
        """Room for such a tensor."""
        return cls(dtype, shape, np.empty(prod(shape), f"<u{DTYPES[dtype].itemsize}"))

    @staticmethod
    def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
        """How large such a tensor is."""
        return prod(shape) * DTYPES[dtype].itemsize

    def tensor(self) -> Tensor:
        """The tensor, sharing memory with these bits."""
        signed = torch.from_numpy(self.words.view(f"<i{self.words.itemsize}"))
        return signed.view(DTYPES[self.dtype]).reshape(self.shape)

    def copy(self) -> "Bits":
        """The same bits in memory of their own."""
        return Bits(self.dtype, self.shape, self.words.copy())

    def fits(self, other: "Bits") -> bool:
        """Whether dtype and shape are the same."""
        return self.dtype == other.dtype and self.shape == other.shape

    def raw(self) -> memoryview:
        """The bytes, little-endian, in the order of the elements."""
        return self.words.view(np.uint8).data

    def fingerprint(self) -> str:
        """XXH3-128 of the bits: whether memory holds what was published. Files are guarded by sha256."""
        return xxh3_128(self.raw()).hexdigest()


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """sha256 of a whole state, given the name, dtype, shape and fingerprint of each tensor, in any order.

    >>> state_digest([("b", "F32", (2, 3), "00"), ("a", "BF16", (), "11")])[:16]
    '374ff1183e266add'
    """
    rows = sorted(f"{name}\0{dtype}\0{'x'.join(map(str, shape))}\0{xxh3}\n" for name, dtype, shape, xxh3 in tensors)
    return hashlib.sha256("".join(rows).encode()).hexdigest()
