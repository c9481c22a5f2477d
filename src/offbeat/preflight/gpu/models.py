"""The tiny models and groups of the checks: head sizes and shapes that GPU kernels accept."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from offbeat.run.quickstart import VOCABULARY, tiny_llama, tokenizer
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan

Layout = Sequence[tuple[int, Sequence[int]]]
"""For each group the tokens of its prompt and of its completions."""


def doctor_llama(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """Return a random Llama in float32 whose weights bfloat16 can hold, with four heads and two key-value heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama(
            hidden_size=256,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.05,
            tie_word_embeddings=tied,
        ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def save_model(directory: Path, model: LlamaForCausalLM) -> None:
    """Write a model with its tokenizer as a Hugging Face directory."""
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def made_groups(layout: Layout, seed: int = 0) -> list[Group]:
    """Return groups of random tokens with rewards; every group has contrast.

    >>> [group] = made_groups([(3, [2, 5])])
    >>> len(group.prompt.token_ids), [len(one.token_ids) for one in group.completions]
    (3, [2, 5])
    """
    rng = np.random.default_rng(seed)

    def completion(name: str, i: int, size: int) -> Completion:
        tokens = rng.integers(2, len(VOCABULARY), size, np.int32)
        logprobs = rng.normal(-np.log(len(VOCABULARY)), 0.1, size).astype(np.float32)
        return Completion(f"{name}/{i}", tokens, logprobs, (VersionSpan(0, 0, size),), score=Score(float(i % 2)))

    groups = []
    for g, (prompt, sizes) in enumerate(layout):
        answers = tuple(completion(f"g{g}", i, size) for i, size in enumerate(sizes))
        groups.append(
            Group(f"g{g}", Prompt(f"p{g}", rng.integers(2, len(VOCABULARY), prompt, np.int32), "doctor"), answers)
        )
    return groups
