"""Start each float32 master anywhere in the interval that rounds to its bfloat16 weight, instead of in the middle.

Weights from a file lie on the grid of bfloat16. A master that starts there has to move by half a step of the grid
before its weight changes at all: at a learning rate of 1e-6 and a weight of 0.02 (half a step is 6e-5), sixty updates
in one direction. Until then the policy, as trainer and engines compute it, gets only the changes of small weights. With
masters spread evenly over their intervals, version 0 has exactly the weights of the file, and from the first update on
the weights follow the masters on average.
"""

import math
from typing import Final

import torch
from torch import Tensor

from offbeat.seeds import derive
from offbeat.trainer.fsdp import own_rows
from offbeat.trainer.optimizer import MasterAdamW

HALF_STEP: Final = 1 << 15
"""Half the distance of two neighbours in bfloat16, in units of the last bit of float32."""
BLOCK: Final = 1 << 20
"""Values that share a random stream. Each rank draws the blocks of its rows, so their number changes nothing."""


@torch.no_grad()
def dither(optimizer: MasterAdamW, seed: int) -> None:
    """Move every master that bfloat16 represents exactly to a random place of its rounding interval, in place.

    The parameters stay as they are. Masters that are zero, or lie between two values of bfloat16 already, stay too.

    >>> from offbeat.trainer.optimizer import OptimizerSettings
    >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> _ = model.weight.data.fill_(0.5)
    >>> optimizer = MasterAdamW(model, OptimizerSettings())
    >>> dither(optimizer, seed=1)
    >>> round(optimizer.tensors()["master/weight"].item(), 6), model.weight.item()
    (0.500174, 0.5)
    """
    for name, master in optimizer.tensors().items():
        kind, _, parameter = name.partition("/")
        if kind == "master":
            start, rows = own_rows(parameter, master)
            first = start * math.prod(master.shape[1:])
            _dither(rows.view(-1), first, master.numel(), derive(seed, "dither", parameter))
    optimizer.round_parameters()


def _dither(values: Tensor, first: int, size: int, seed: int) -> None:
    """Dither this rank's values: those from index `first` on, of a tensor of so many."""
    bits, end = values.view(torch.int32), first + len(values)
    generator = torch.Generator(values.device)
    for block in range(first // BLOCK * BLOCK, end, BLOCK):
        generator.manual_seed(derive(seed, block))
        shape = (min(BLOCK, size - block),)
        noise = torch.randint(
            1 - HALF_STEP, HALF_STEP, shape, generator=generator, device=values.device, dtype=torch.int32
        )
        low, high = max(first, block), min(end, block + BLOCK)
        piece = bits[low - first : high - first]
        on_grid = ((piece & 0xFFFF) == 0) & (piece << 1 != 0)
        piece += torch.where(on_grid, noise[low - block : high - block], 0)
