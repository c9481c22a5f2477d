"""Train on the same groups with shared prefixes and plain rows, whole and in pieces: how large is the difference?"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lab.bench.training_arms import load
from lab.fixtures import smollm2
from offbeat.objective.presets import PRESETS
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import ModelCheck, PolicyModel, to_model_inputs
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score

Case = tuple[Callable[[], PreTrainedModel], list[Group], list[int]]
"""A model, groups to train it on, and token budgets that split them; the first budget takes them whole."""


@dataclass(frozen=True)
class Differences:
    """The largest differences found."""

    completions: int
    tokens: int
    splits: int
    logprobs: float
    rounding: float
    """Difference of log-probs of plain rows between splits of the batch: no method can be better."""
    shared_gradients: float
    split_loss: float
    split_gradient: float
    split_parameters: float


@dataclass(frozen=True)
class Run:
    """One step and everything it computed."""

    logprobs: dict[tuple[int, int], Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    loss: float


def small_case() -> Case:
    """Return a Llama with two layers and random groups of different lengths."""

    def model() -> PreTrainedModel:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=2, initializer_range=0.1, **sizes))

    rng = np.random.default_rng(0)
    answers = [[rng.integers(0, 96, rng.integers(1, 20), np.int32) for _ in range(6)] for _ in range(6)]
    prompts = [rng.integers(0, 96, rng.integers(1, 30), np.int32) for _ in answers]
    return model, _groups(prompts, answers), [2000, 50, 120, 400]


def smollm2_case(dtype: torch.dtype = torch.float32) -> Case:
    """Return SmolLM2 and its own answers, sampled at temperature 1."""
    questions = ["What is 17 + 25?", "Name three colours of the rainbow and say which one you like.", "Hi!"]
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.directory()), local_files_only=True)
    model = load(torch.float32).eval()
    prompts, answers = [], []
    torch.manual_seed(0)
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, return_tensors="pt")
        sampled = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=20, num_return_sequences=4
        )
        prompts.append(ids[0].int().numpy())
        # Cut to different lengths, because few of its answers end within 20 tokens.
        answers.append([row[ids.shape[1] :][: 20 - 5 * i].int().numpy() for i, row in enumerate(sampled)])
    return lambda: load(dtype), _groups(prompts, answers), [2000, 150]


def _groups(prompts: list[NDArray[np.int32]], answers: list[list[NDArray[np.int32]]]) -> list[Group]:
    return [
        Group(
            f"g{g}",
            Prompt(f"p{g}", prompt, "exact"),
            tuple(Completion(f"g{g}/{i}", ids, UNKNOWN, score=Score(float(i % 2))) for i, ids in enumerate(group)),
        )
        for g, (prompt, group) in enumerate(zip(prompts, answers, strict=True))
    ]


def compare_paths(model: Callable[[], PreTrainedModel], groups: list[Group], budgets: list[int]) -> Differences:
    """Train with every budget on both paths. Splits are compared with the whole batch on their own path."""
    whole = {shared: _run(model(), groups, budgets[0], shared) for shared in (True, False)}
    splits, rounding = [], 0.0
    for shared, of in whole.items():
        for budget in budgets[1:]:
            run = _run(model(), groups, budget, shared)
            splits.append(_split_differences(run, of))
            rounding = rounding if shared else max(rounding, _farthest(run, of))
    loss, gradient, parameters = (max(column) for column in zip(*splits, strict=True))
    return Differences(
        completions=sum(len(g.completions) for g in groups),
        tokens=sum(len(c.token_ids) for g in groups for c in g.completions),
        splits=len(splits),
        logprobs=_farthest(whole[True], whole[False]),
        rounding=rounding,
        shared_gradients=max(_relative(g, whole[False].gradients[n]) for n, g in whole[True].gradients.items()),
        split_loss=loss,
        split_gradient=gradient,
        split_parameters=parameters,
    )


def _farthest(one: Run, other: Run) -> float:
    return max(float((one.logprobs[k] - other.logprobs[k]).abs().max()) for k in other.logprobs)


def _split_differences(run: Run, of: Run) -> tuple[float, float, float]:
    """Return the differences of loss, whole gradient, and parameters relative to the largest weight of their tensor."""
    changes = {
        n: (run.parameters[n] - of.parameters[n]).abs().max() / of.parameters[n].abs().max() for n in of.parameters
    }
    gradient = _relative(_flat(run.gradients), _flat(of.gradients))
    return abs(run.loss - of.loss) / abs(of.loss), gradient, float(max(changes.values()))


class _GradientRecorder(MasterAdamW):
    """An optimizer that keeps a copy of the gradients before it uses them."""

    def update(self, step: int, norm: float | None = None) -> float:
        self.seen = {name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None}
        return super().update(step, norm)


def _run(model: PreTrainedModel, groups: list[Group], budget: int, shared: bool) -> Run:
    policy_model = PolicyModel(model)
    optimizer = _GradientRecorder(policy_model, OptimizerSettings(Schedule(1e-6)))
    # red-drop uses only the log-probs of the policy, so only the arithmetic of the passes can differ.
    trainer = Trainer(policy_model, optimizer, StepSettings(PRESETS["red-drop"].objective, token_budget=budget))
    assert trainer.check.shared_prefix, trainer.check.message
    if not shared:
        trainer.check = ModelCheck(False, "requested")
        policy_model.model.set_attn_implementation("sdpa")
    logprobs = _logprobs(policy_model, groups, budget, shared)
    done = trainer.train(groups)
    assert isinstance(done, Trained)
    parameters = {name: p.detach().clone() for name, p in policy_model.named_parameters()}
    return Run(logprobs, optimizer.seen, parameters, done.metrics["loss"])


@torch.no_grad()
def _logprobs(
    policy_model: PolicyModel, groups: list[Group], budget: int, shared: bool
) -> dict[tuple[int, int], Tensor]:
    found: dict[tuple[int, int], Tensor] = {}
    for part in plan_micro_batches(groups, budget, shared_prefix=shared):
        stats = policy_model(
            to_model_inputs(build_micro_batch(part, groups), shared_prefix=shared, device=policy_model.device)
        )
        lengths = [len(groups[g].completions[c].token_ids) for g, c in part.completions]
        found |= dict(zip(part.completions, stats.logprobs.split(lengths), strict=True))
    return found


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
