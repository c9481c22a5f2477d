"""A shuffled order that needs no memory: where a run stands in it is one integer.

Epoch e is a permutation keyed by (seed, e), computed one position at a time, so resuming at position n costs nothing
and a generated task may have 10^12 examples.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from offbeat.seeds import derive

_ROUNDS: Final = 6


@dataclass(frozen=True)
class Order:
    """Positions 0, 1, 2, … without end; each run of `size` positions visits every index once.

    >>> order = Order(size=5, seed=7)
    >>> [order.index(position) for position in range(10)]
    [4, 0, 3, 2, 1, 4, 0, 1, 3, 2]
    >>> order.epoch(9)
    1
    """

    size: int
    seed: int
    name: str = "prompts"
    """The stream of the seed tree it draws from."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(
                f"an order of {self.size} examples: there is nothing to visit; check the data and its filters"
            )

    def epoch(self, position: int) -> int:
        """How often everything had been visited before this position."""
        return position // self.size

    def index(self, position: int) -> int:
        """Which example stands at a position: a pure function of (seed, epoch, position)."""
        if position < 0:
            raise ValueError(f"position {position}: positions start at 0")
        epoch, place = divmod(position, self.size)
        key = derive(self.seed, self.name, epoch).to_bytes(8, "big")
        return _permuted(place, self.size, key)


def _permuted(place: int, size: int, key: bytes) -> int:
    """A keyed permutation of range(size): a Feistel network, walked until it lands inside the range."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "big") + bytes([round_]), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
        place = left << half | right
        if place < size:
            return place
