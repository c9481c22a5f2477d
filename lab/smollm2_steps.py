"""Real policy-gradient steps on SmolLM2-135M, small enough for two cores: for benchmarks of what a step changes."""

import random
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from offbeat.objective.aggregate import counts
from offbeat.objective.credit import assign_credit
from offbeat.objective.logprobs import token_stats
from offbeat.objective.losses import Streams, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.types import UNKNOWN
from smollm2 import directory

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

GROUPS, SIZE, TOKENS = 2, 4, 8
ABOUT = (
    f"GRPO on sums, {GROUPS} groups of {SIZE} completions of {TOKENS} tokens sampled afresh at temperature 1, "
    f"float32, AdamW without weight decay (betas 0.9, 0.999), gradient norm clipped at 1"
)


class PolicySteps:
    """A policy that is trained step by step. The reward is 1 for the right sum, and up to 0.1 for writing digits."""

    def __init__(self, learning_rate: float, seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(seed)
        self._random = random.Random(seed)
        self._tokenizer = AutoTokenizer.from_pretrained(directory())
        self._model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(directory(), dtype=torch.float32)
        self._optimizer = AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def serving(self) -> dict[str, Tensor]:
        """The state as it is served: bf16, without the tied head."""
        return {name: tensor.detach().bfloat16() for name, tensor in self._model.named_parameters()}

    def step(self) -> float:
        """One step on fresh groups; returns their mean reward."""
        prompts_NP, sums = self._prompts()
        completions_NT, behavior_NT = self._sample(prompts_NP)
        answers = self._tokenizer.batch_decode(completions_NT, skip_special_tokens=True)
        rewards_BG = torch.tensor([_reward(a, s) for a, s in zip(answers, sums, strict=True)]).view(GROUPS, SIZE)
        objective = PRESETS["grpo"].objective
        mask_NT = torch.ones_like(completions_NT, dtype=torch.bool)
        scored_BG = torch.ones_like(rewards_BG, dtype=torch.bool)
        credit = assign_credit(objective, rewards_BG, scored_BG, mask_NT.sum(-1).view(GROUPS, SIZE))
        advantages_N, weights_N, mask_NT = credit.rows(mask_NT)
        hidden_NTH = self._model.model(torch.cat([prompts_NP, completions_NT], 1)).last_hidden_state[
            :, -TOKENS - 1 : -1
        ]
        policy_NT = token_stats(hidden_NTH, self._model.lm_head.weight, completions_NT).logprobs
        streams = Streams(policy_NT, behavior_NT, policy_NT.detach(), UNKNOWN, advantages_N, weights_N, mask_NT)
        self._optimizer.zero_grad()
        policy_loss(objective, streams, counts(mask_NT), length_limit=TOKENS).total.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(rewards_BG.mean())

    def _prompts(self) -> tuple[Tensor, list[int]]:
        pairs = [(self._random.randint(10, 99), self._random.randint(10, 99)) for _ in range(GROUPS)]
        rows = []
        for a, b in pairs:
            message = [{"role": "user", "content": f"What is {a}+{b}? Answer with a number."}]
            tokens = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            rows += [tokens] * SIZE
        return torch.tensor(rows), [a + b for a, b in pairs for _ in range(SIZE)]  # digits are tokens: equal lengths

    @torch.no_grad()
    def _sample(self, prompts_NP: Tensor) -> tuple[Tensor, Tensor]:
        from transformers import DynamicCache

        cache, unread, tokens, logprobs = DynamicCache(config=self._model.config), prompts_NP, [], []
        for _ in range(TOKENS):
            hidden_NH = self._model.model(unread, past_key_values=cache).last_hidden_state[:, -1]
            logprobs_NV = (hidden_NH @ self._model.lm_head.weight.T).log_softmax(-1)
            unread = torch.multinomial(logprobs_NV.exp(), 1)
            tokens.append(unread)
            logprobs.append(logprobs_NV.gather(-1, unread))
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def _reward(answer: str, expected: int) -> float:
    """The small part gives every group a contrast to learn from."""
    right = re.search(rf"\b{expected}\b", answer) is not None
    return float(right) + 0.1 * sum(c.isdigit() for c in answer) / max(1, len(answer))
