"""How a step's gradient points beside the exact one: that of the pass rate of its prompts, from no samples at all."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedTokenizerBase

from offbeat.tasks.data import Example
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.trainer import Trainer


@dataclass
class Aimed:
    """A trainer whose gradients are compared. It draws no random numbers and changes no gradient."""

    trainer: Trainer
    rows: Sequence[tuple[list[int], list[int]]]
    """Every prompt and its right answer, as tokens."""
    ids: Sequence[str]
    cosine: float = 0.0
    """Of the last step."""
    exact: Tensor = field(init=False)

    @classmethod
    def of(cls, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> "Aimed":
        rows = [(tokenizer.encode(str(one.prompt)), tokenizer.encode(str(one.columns["answer"]))) for one in examples]
        return cls(trainer, rows, [one.id for one in examples])

    def __post_init__(self) -> None:
        optimizer = self.trainer.optimizer
        update = optimizer.update

        def compare(step: int, norm: float | None = None) -> float:
            own = torch.cat([one.grad.flatten() for one in self._parameters if one.grad is not None])
            self.cosine = -float(cosine_similarity(own, self.exact, dim=0))  # own is that of a loss, exact of a rate
            return update(step, norm)

        optimizer.update = compare  # type: ignore[method-assign]

    @property
    def _parameters(self) -> list[Tensor]:
        return [one for one in self.trainer.policy_model.model.parameters() if one.requires_grad]

    def aim(self, prompts: Collection[str]) -> None:
        """Compute the gradient of the mean pass rate of these prompts, for the policy as it is."""
        asked = compress(self.rows, (name in prompts for name in self.ids))
        rate = pass_rate(self.trainer.policy_model, [*asked])
        self.exact = torch.cat([one.flatten() for one in torch.autograd.grad(rate, self._parameters)])


def pass_rate(model: PolicyModel, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Return the mean probability of right answers, with a gradient. A row is a prompt and its answer, as tokens."""
    end = model.model.config.eos_token_id
    longest = max(len(prompt) + len(answer) for prompt, answer in rows) + 1
    ids_NT = torch.tensor([one + two + [end] * (longest - len(one) - len(two)) for one, two in rows])
    starts_N1, ends_N1 = (
        torch.tensor(ends)[:, None] - 1
        for ends in ([len(one) for one, _ in rows], [len(one) + len(two) for one, two in rows])
    )
    places_T = torch.arange(longest - 1)
    logprobs_NT = model.logits(ids_NT)[:, :-1].log_softmax(-1).gather(-1, ids_NT[:, 1:, None])[..., 0]
    answer_NT = (places_T >= starts_N1) & (places_T <= ends_N1)
    return logprobs_NT.where(answer_NT, 0.0).sum(-1).exp().mean()
