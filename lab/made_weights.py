"""States of a policy made by a formula: any version can be made at any time, and neighbours differ in few elements."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EVERY = 256
"""From one version to the next, one element in this many changes by one unit in its last place."""


@cache
def _drawn(elements: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    rng = np.random.default_rng(elements)
    return rng.integers(0, 2**16, elements, np.uint16), rng.integers(0, EVERY, elements)


def made(version: int, elements: int = 40_000, tensors: int = 4) -> dict[str, Tensor]:
    """The state of a version.

    >>> one, next_one = made(6)["layer.0"].view(torch.int16), made(7)["layer.0"].view(torch.int16)
    >>> int((one != next_one).sum())
    40
    """
    bits, offsets = _drawn(elements)
    words = bits + ((version + offsets) // EVERY).astype(np.uint16)
    flat = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    return {f"layer.{i}": part for i, part in enumerate(flat.chunk(tensors))}


def equals(state: dict[str, Tensor], version: int, elements: int = 40_000, tensors: int = 4) -> bool:
    """Whether a state is, bit by bit, that of the version.

    >>> equals(made(3), 3), equals(made(3), 4)
    (True, False)
    """
    expected = made(version, elements, tensors)
    return list(state) == list(expected) and all(
        torch.equal(state[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected
    )
