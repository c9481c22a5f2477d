"""What gates over the whole batch let through, for every micro-batch of every rank.

    this rank's log-ratios ─ a table of the whole batch ─ sum over ranks ─ gate_batch ─ the rows of each micro-batch

The table has a row for every completion of the batch, and one rank fills each of its cells. So every rank decides the
same, from the same numbers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offbeat.objective.gates import gate_batch
from offbeat.objective.losses import Streams, log_ratios
from offbeat.objective.spec import Need, Objective
from offbeat.trainer.batch import Batch, MicroBatchTensors
from offbeat.trainer.fsdp import Ranks


def first_look(
    objective: Objective, batch: Batch, parts: Sequence[MicroBatchTensors], looks: Sequence[Streams], ranks: Ranks
) -> Iterator[Tensor]:
    """Yield `gate_NT` for each of this rank's micro-batches; `looks` are their streams, from a pass without gradient.

    The loss uses these decisions even if its own forward pass rounds differently.
    """
    longest = max(len(one.token_ids) for group in batch.trimmed for one in group.completions)
    advantages_N = batch.credit.advantages_BG.flatten().to(parts[0].mask_NT.device)
    table = torch.zeros(2, len(advantages_N), longest, dtype=torch.float64, device=advantages_N.device)
    for part, streams in zip(parts, looks, strict=True):
        against_NT = streams.need(Need(objective.against.value))
        ratios_NT = log_ratios(streams.policy_NT, against_NT, part.mask_NT)
        # A micro-batch that does not count is masked out: it adds 0 to rows that another rank fills.
        table[:, part.flat_indices_N, : ratios_NT.shape[1]] += torch.stack([ratios_NT, part.mask_NT]).double()
    ratios_NT, trained_NT = ranks.sum(table)
    group_size = batch.rewards_BG.shape[1]
    gate_NT = gate_batch(objective, ratios_NT, advantages_N, trained_NT > 0, group_size=group_size)
    for part in parts:
        yield gate_NT[part.flat_indices_N, : part.mask_NT.shape[1]]
