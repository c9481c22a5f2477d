"""The exact KL(π ‖ π_0) of the answers to the sums: of their first two tokens, after which hardly anything is open."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offbeat.tasks.data import Example
from offbeat.trainer.forward import PolicyModel


@dataclass
class ExactKL:
    """How far a policy has moved from where it was when this was made."""

    model: PolicyModel
    prompts_PT: Tensor
    digits_D: Tensor
    start: tuple[Tensor, Tensor] = field(init=False)

    @classmethod
    def of(cls, model: PolicyModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> "ExactKL":
        prompts_PT = torch.tensor([tokenizer.encode(str(one.prompt)) for one in examples])
        return cls(model, prompts_PT, torch.tensor(tokenizer.encode("0123456789")))

    def __post_init__(self) -> None:
        self.start = self._logprobs()

    @torch.no_grad()
    def _logprobs(self) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the first token, [P, V], and of the second one after each digit, [P, D, V]."""
        first_PV = self.model.logits(self.prompts_PT)[:, -1].double().log_softmax(-1)
        count, digits = len(self.prompts_PT), len(self.digits_D)
        longer = [self.prompts_PT.repeat_interleave(digits, 0), self.digits_D.repeat(count)[:, None]]
        second = self.model.logits(torch.cat(longer, 1))[:, -1].double().log_softmax(-1)
        return first_PV, second.view(count, digits, -1)

    def now(self) -> float:
        """Return the mean KL over all prompts."""
        (first_PV, second_PDV), (start_PV, start_PDV) = self._logprobs(), self.start
        after_PD = first_PV.exp()[:, self.digits_D]
        kl_PD = (second_PDV.exp() * (second_PDV - start_PDV)).sum(-1)
        return float(((first_PV.exp() * (first_PV - start_PV)).sum(-1) + (after_PD * kl_PD).sum(-1)).mean())
