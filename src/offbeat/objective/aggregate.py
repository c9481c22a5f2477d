"""From token terms to one number, by counts of the whole batch: a sum over micro-batches and ranks stays exact."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.objective.spec import Aggregate


@dataclass(frozen=True)
class Counts:
    """What the loss is divided by. Add up those of all micro-batches and ranks before the first backward pass.

    >>> Counts(tokens=300, sequences=4) + Counts(tokens=100, sequences=4)
    Counts(tokens=400, sequences=8)
    """

    tokens: int
    sequences: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


def counts(mask_NT: Tensor) -> Counts:
    """Tokens under the mask, and completions that have any."""
    return Counts(int(mask_NT.sum()), int(mask_NT.any(-1).sum()))


def aggregate(
    kind: Aggregate, values_NT: Tensor, mask_NT: Tensor, total: Counts, *, length_limit: int | None = None
) -> Tensor:
    """The share these rows have in the batch's aggregate. `values_NT` must be 0 where masked.

    >>> import torch
    >>> values, mask = torch.tensor([[1.0, 1.0, 1.0], [6.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    >>> [float(aggregate(kind, values, mask, counts(mask), length_limit=9)) for kind in Aggregate]
    [2.25, 3.5, 4.5, 0.5]
    """
    if kind is Aggregate.TOKEN_MEAN:
        return values_NT.sum() / max(total.tokens, 1)
    per_sequence = values_NT.sum(-1)
    if kind is Aggregate.SEQUENCE_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / mask_NT.sum(-1).clamp(min=1)
    if kind is Aggregate.CONSTANT:
        if length_limit is None:
            raise ValueError("aggregate 'constant' divides by the length limit: give length_limit")
        per_sequence = per_sequence / length_limit
    return per_sequence.sum() / max(total.sequences, 1)
