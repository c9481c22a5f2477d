"""Small models and groups with everything a trainer meets: ragged lengths, lag, completions from other sources."""

from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbeat.objective.spec import Objective
from offbeat.trainer.batch import PADDING, PROMPT, build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, to_model_inputs
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan

VOCABULARY = 48


def a_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A Llama of two layers, with four query heads and two key-value heads."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def a_group(name: str, rng: np.random.Generator, prompt: int, sizes: list[int], *, version: int = 0) -> Group:
    """A group with random tokens, behavior log-probs and rewards, some of them equal."""

    def completion(i: int, size: int) -> Completion:
        return Completion(
            f"{name}/{i}",
            rng.integers(0, VOCABULARY, size),
            rng.normal(-3.0, 0.5, size),
            (VersionSpan(version, 0, size),),
            score=Score(float(rng.integers(0, 3)) / 2),
        )

    tokens = rng.integers(0, VOCABULARY, prompt)
    return Group(name, Prompt(f"p-{name}", tokens, "made-up"), tuple(completion(i, n) for i, n in enumerate(sizes)))


def some_groups(seed: int, count: int = 3, size: int = 4) -> list[Group]:
    """Groups of ragged prompts and completions."""
    rng = np.random.default_rng(seed)
    return [
        a_group(f"g{i}", rng, int(rng.integers(1, 9)), rng.integers(1, 9, size).tolist(), version=i)
        for i in range(count)
    ]


def close_to(policy_model: PolicyModel, groups: list[Group], *, spread: float, seed: int = 0) -> list[Group]:
    """The groups with behavior log-probs near the policy's own, so that gates stop some tokens and not others."""
    rng = np.random.default_rng(seed)
    near = []
    for group in groups:
        answers = []
        for completion, own in zip(group.completions, logprobs(policy_model, [group]), strict=True):
            noisy = own.float().numpy() + spread * rng.normal(size=len(own))
            answers.append(
                Completion(
                    completion.id,
                    completion.token_ids,
                    noisy,
                    completion.versions,
                    completion.loss_mask,
                    score=completion.score,
                )
            )
        near.append(Group(group.id, group.prompt, tuple(answers)))
    return near


@torch.no_grad()
def logprobs(policy_model: PolicyModel, groups: list[Group]) -> list[torch.Tensor]:
    """The log-probs of every completion, in order, computed on plain rows."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for part in plan_micro_batches(groups, 1 << 20, shared_prefix=False):
        inputs = to_model_inputs(build_micro_batch(part, groups), shared_prefix=False, device=policy_model.device)
        sizes = [len(groups[g].completions[c].token_ids) for g, c in part.completions]
        found |= dict(zip(part.completions, policy_model(inputs).logprobs.split(sizes), strict=True))
    return [found[g, c] for g, group in enumerate(groups) for c in range(len(group.completions))]


def a_trainer(
    objective: Objective,
    *,
    seed: int = 0,
    rate: float = 1e-2,
    reference: PolicyModel | None = None,
    optimizer: OptimizerSettings | None = None,
    model: PreTrainedModel | None = None,
    policy_model: PolicyModel | None = None,
    **settings: object,
) -> Trainer:
    policy_model = policy_model or PolicyModel(a_llama(seed) if model is None else model)
    adamw = MasterAdamW(policy_model, optimizer or OptimizerSettings(Schedule(rate)))
    return Trainer(policy_model, adamw, StepSettings(objective, **settings), reference)  # type: ignore[arg-type]


def lagged(seed: int, spread: float = 0.15) -> list[Group]:
    return close_to(PolicyModel(a_llama()), some_groups(seed), spread=spread, seed=seed)


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy_model.parameters()])


def moved(trainer: Trainer, groups: list[Group], **arguments: object) -> torch.Tensor:
    """The change of the parameters in one step."""
    before = parameters(trainer)
    done = trainer.train(groups, **arguments)  # type: ignore[arg-type]
    assert isinstance(done, Trained), done
    return parameters(trainer) - before


def equal_rewards(group: Group) -> Group:
    return replace(group, completions=tuple(replace(c, score=Score(1.0)) for c in group.completions))


def visible_keys(segment_ids_RL: np.ndarray) -> np.ndarray:
    """[R, L, L]: the keys (last axis) that a query may look at. Padding sees itself, so that no query sees nothing."""
    length = segment_ids_RL.shape[1]
    query, key = segment_ids_RL[:, :, None], segment_ids_RL[:, None, :]
    within = (key == PROMPT) | (key == query)
    visible = np.tri(length, dtype=np.bool_) & within & (query != PADDING) & (key != PADDING)
    return visible | np.eye(length, dtype=np.bool_)
