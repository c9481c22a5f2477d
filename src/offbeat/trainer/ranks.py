"""Who computes what when several processes train one policy.

Every rank is given the whole batch and assigns the same credit to it, so that counts and plans agree without a word.
What travels is sums: gradients (by whoever shards the model) and the few numbers of `Ranks.sum`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, distributed

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone by default.

    >>> alone = Ranks()
    >>> alone.share(["a", "b", "c"])
    [('a', True), ('b', True), ('c', True)]
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Every `size`-th item, and whether it counts. All ranks get equally many: sharded forwards meet in pairs.

        Where items run out, a rank repeats the last one, which then does not count.

        >>> [Ranks(rank, 2).share(["a", "b", "c"]) for rank in (0, 1)]
        [[('a', True), ('c', True)], [('b', True), ('c', False)]]
        """
        rounds = -(-len(items) // self.size)
        places = [turn * self.size + self.rank for turn in range(rounds)]
        return [(items[min(place, len(items) - 1)], place < len(items)) for place in places]

    def sum(self, values: Tensor) -> Tensor:
        """Summed over ranks, in place; as it is when alone."""
        if self.size > 1:
            distributed.all_reduce(values, group=self.group)
        return values
