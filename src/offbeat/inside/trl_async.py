"""TRL's asynchronous trainer, which is experimental itself: a preset as its loss, with drift and gates as figures.

Its workers generate while it trains, and its own loss clips around the policy that generated. Here any preset that one
stream of log-probs allows corrects for that lag, for example `rec-oneside-is`, or `cispo` with its cap. Advantages stay
TRL's, because its workers compute them, and TRL logs the staleness of samples. Averages are over tokens of the whole
micro-batch, as TRL's. Its attention needs a GPU, so only the loss was executed, on a CPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer

from offbeat.errors import NotServable
from offbeat.inside.losses import host_loss
from offbeat.inside.objectives import objective_for
from offbeat.objective.losses import Counts
from offbeat.objective.spec import Aggregate, Objective


class OffPolicyAsyncGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]  # TRL comes without types
    """`AsyncGRPOTrainer` with the loss of a preset; it takes the same arguments, and the preset."""

    def __init__(self, *args: Any, preset: str | Objective = "rec-oneside-is", **kwargs: Any) -> None:
        self.objective = one_stream(preset)
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Callable[..., Any], inputs: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Let TRL compute its figures on the model's output, and return our loss on the same output."""
        outputs: list[Any] = []

        def remember(**given: Any) -> Any:
            outputs.append(model(**given))
            return outputs[0]

        super().compute_loss(remember, inputs, *args, **kwargs)
        chosen = inputs["token_index"] >= 0
        segment, place = rows_of_segments(inputs["segment_id"][chosen])
        shape = (int(segment.max()) + 1, int(place.max()) + 1)

        def padded(flat: Tensor) -> Tensor:
            return flat.new_zeros(shape).index_put((segment, place), flat)

        policy = outputs[0].log_probs.flatten()[inputs["token_index"][chosen]]
        tokens = int(inputs["global_n_tokens"][0])
        loss, figures = host_loss(
            self.objective,
            padded(policy),
            padded(inputs["old_log_probs"][chosen]),
            padded(inputs["advantages"][chosen]),
            padded(torch.ones_like(policy)),
            total=Counts(tokens, shape[0]),
        )
        for name, value in figures.items():
            self._metrics["train"][f"offbeat/{name}"].append(value)
        # Gradients are averaged over processes and added up over the parts of a step.
        shares = float(self.accelerator.num_processes) / float(self.current_gradient_accumulation_steps)
        return loss * shares


def one_stream(preset: str | Objective) -> Objective:
    """Return the objective, if TRL's asynchronous trainer can serve it."""
    objective = objective_for(preset, host="TRL's asynchronous trainer", streams=1)
    if objective.aggregate is not Aggregate.TOKEN_MEAN:
        raise NotServable(
            f"{preset!r} averages over completions, and TRL's asynchronous trainer counts tokens: choose rec-oneside-is"
        )
    return objective


def rows_of_segments(segment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the place in it of each token of a flat batch whose segments follow each other.

    >>> rows_of_segments(torch.tensor([0, 0, 2, 2, 2]))
    (tensor([0, 0, 1, 1, 1]), tensor([0, 1, 0, 1, 2]))
    """
    _, row, counts = segment.unique_consecutive(return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    return row, torch.arange(len(segment), device=segment.device) - starts[row]
