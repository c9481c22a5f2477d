"""The arms of `python -m lab.bench.trainer`: our trainer, a bare PyTorch loop, and TRL, on the same groups.

All train SmolLM2-135M with float32 masters and Adam moments, compute in `DTYPE`, and make one update per batch.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lab.fixtures import smollm2
from offbeat.objective.presets import PRESETS
from offbeat.placement.hardware import multiplies_bfloat16
from offbeat.trainer.forward import ModelCheck, PolicyModel
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan

VOCABULARY = 49_152
RATE = 1e-6


DTYPE: Final = torch.bfloat16 if multiplies_bfloat16() else torch.float32
"""Of the matrix products in every arm, also of TRL and TorchRL: the one in which this processor computes fastest."""
DTYPE_NAME: Final = str(DTYPE).removeprefix("torch.")


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of a completion, and groups per batch and per micro-batch."""

    prompt: int
    completion: int
    size: int
    groups: int
    together: int
    """Groups per forward and backward pass, the same for every arm."""

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.completion}/{self.size}"

    @property
    def slug(self) -> str:
        """The name as part of the id of a row."""
        return self.name.replace("/", "-")

    def make_groups(self) -> list[Group]:
        """Return groups of random tokens; half of each group is right. Lengths are equal: no arm pays for padding."""
        rng = np.random.default_rng(0)

        def completion(group: int, i: int) -> Completion:
            tokens = rng.integers(0, VOCABULARY, self.completion, np.int32)
            span = (VersionSpan(0, 0, self.completion),)
            logprobs = np.full(self.completion, -12.0)
            return Completion(f"g{group}/{i}", tokens, logprobs, span, score=Score(float(i % 2)))

        return [
            Group(
                f"g{g}",
                Prompt(f"p{g}", rng.integers(0, VOCABULARY, self.prompt, np.int32), "random"),
                tuple(completion(g, i) for i in range(self.size)),
            )
            for g in range(self.groups)
        ]

    def flops(self, *, shared: bool) -> float:
        """Return the operations of the matrix products of a step: 6 per parameter and token, without attention."""
        body, head = 106_203_456, VOCABULARY * 576
        answers = self.groups * self.size * self.completion
        prompts = self.groups * self.prompt * (1 if shared else self.size)
        return 6.0 * (body * (prompts + answers) + head * answers)


def load(dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        str(smollm2.directory()), dtype=dtype, attn_implementation=attention, local_files_only=True
    )


def our_step(shape: Shape, *, shared: bool) -> Callable[[], None]:
    """Return a step of our trainer with everything: credit, packing, metrics."""
    row = shape.prompt + shape.completion * (shape.size if shared else 1)
    budget = row * shape.together * (1 if shared else shape.size)
    policy_model = PolicyModel(load(DTYPE))
    settings = StepSettings(PRESETS["rec-oneside-nois"].objective, token_budget=budget)
    trainer = Trainer(policy_model, MasterAdamW(policy_model, OptimizerSettings()), settings)
    if not shared:
        trainer.check = ModelCheck(False, "requested")
        policy_model.model.set_attn_implementation("sdpa")
    groups = shape.make_groups()

    def step() -> None:
        assert isinstance(trainer.train(groups), Trained)

    return step


def rows(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return every completion after its own prompt, [N, prompt + completion], and its advantage [N]."""
    groups = shape.make_groups()
    ids = [np.concatenate([g.prompt.token_ids, c.token_ids]) for g in groups for c in g.completions]
    return torch.from_numpy(np.stack(ids)).long(), torch.tensor(
        [i % 2 - 0.5 for _ in groups for i in range(shape.size)]
    )


def bare_step(shape: Shape, attention: str = "sdpa") -> Callable[[], None]:
    """Return a step of plain REINFORCE: padded rows, logits of the completion alone, log_softmax, backward, AdamW."""
    model = load(DTYPE, attention).eval()
    optimizer = MasterAdamW(model, OptimizerSettings())
    ids, advantages = rows(shape)
    each = shape.together * shape.size

    def step() -> None:
        for start in range(0, len(ids), each):
            part, credit = ids[start : start + each], advantages[start : start + each, None]
            hidden = model.model(part, use_cache=False).last_hidden_state[:, shape.prompt - 1 : -1]
            logits = model.lm_head(hidden).float()
            logprobs = logits.log_softmax(-1).gather(-1, part[:, shape.prompt :, None]).squeeze(-1)
            loss = -(credit * logprobs).sum() / (len(ids) * shape.completion)
            loss.backward()
        optimizer.update(0)

    return step


def trl_step(shape: Shape) -> Callable[[], None]:
    """Return a step of TRL on rows that it has padded itself: `compute_loss`, backward pass, AdamW; no generation."""
    from transformers import AutoTokenizer

    from lab.fixtures.trl_trainer import scripted_trainer

    model = load(torch.float32)
    groups = shape.make_groups()
    completions = [c for g in groups for c in g.completions]
    scripted = {
        "prompt_ids": [g.prompt.token_ids.tolist() for g in groups for _ in g.completions],
        "completion_ids": [c.token_ids.tolist() for c in completions],
        "logprobs": None,
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = scripted_trainer(
            model,
            AutoTokenizer.from_pretrained(str(smollm2.directory())),
            scripted,
            directory,
            per_device_train_batch_size=len(completions),
            num_generations=shape.size,
            max_completion_length=shape.completion,
            bf16=DTYPE is torch.bfloat16,
            gradient_checkpointing=False,
        )
    each = shape.together * shape.size
    trainer.current_gradient_accumulation_steps = len(completions) // each
    wrapped = trainer.accelerator.prepare_model(model.train())
    batch = trainer._generate_and_score_completions(
        [{"prompt": "x", "grade": float(i % 2)} for i in range(len(completions))]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step() -> None:
        for start in range(0, len(completions), each):
            part = {k: v[start : start + each] if isinstance(v, Tensor) and v.ndim else v for k, v in batch.items()}
            trainer.accelerator.backward(trainer.compute_loss(wrapped, part))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
