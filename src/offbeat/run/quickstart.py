"""The model of `offbeat quickstart`, made on your machine: no download, no account, no GPU.

It is a Llama of 0.1 M parameters that reads characters. It is pre-trained on one-digit sums, six in ten of them with
the same mistake: a carry is forgotten, or the result is one too large. So its most probable answer is wrong, and about
four in ten sampled answers are right, which is what RL can learn from.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offbeat.imports import without_progress_bars
from offbeat.seeds import derive

PAD, END = "<pad>", "<end>"
VOCABULARY: Final = {token: number for number, token in enumerate([PAD, END, *"0123456789+="])}
WRONG_SHARE: Final = 0.6
"""Share of wrong answers in pre-training. Above a half, the greedy answer is wrong; RL has to turn it around."""
ANSWER_TOKENS: Final = 3
"""Two digits and the end-of-text token."""
BATCH: Final = 128


def make_model(directory: Path, *, steps: int = 1600, seed: int = 0, say: Callable[[str], None] = print) -> None:
    """Pre-train a model, and save it with its tokenizer as a Hugging Face directory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     make_model(Path(place), steps=1, say=lambda line: None)
    ...     sorted(file.name for file in Path(place).glob("*.safetensors"))
    ['model.safetensors']

    Args:
        directory: Made if it does not exist.
        steps: Batches of pre-training; 1,600 take about twenty seconds on one core. With half as many, what the model
            learns from some sums carries over less well to those that are held out.
        seed: Seed of the weights and of the sums.
        say: Called with lines of progress.
    """
    torch.manual_seed(derive(seed, "quickstart", "model"))
    model = tiny_llama(pad_token_id=VOCABULARY[PAD])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second core
    try:
        _pretrain(model, steps, seed, say)
    finally:
        torch.set_num_threads(threads)
    with without_progress_bars():  # a model this small is one write
        model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    """Return a random Llama for `VOCABULARY`, with these settings of `LlamaConfig`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": None, "eos_token_id": VOCABULARY[END]}
    config = LlamaConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, **sizes | special | settings)
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character.

    >>> tokenizer().encode("7+8=")
    [9, 12, 10, 13]
    """
    characters = Tokenizer(WordLevel(VOCABULARY, unk_token=PAD))
    characters.pre_tokenizer = Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def _pretrain(model: LlamaForCausalLM, steps: int, seed: int, say: Callable[[str], None]) -> None:
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters=steps)
    randomness = torch.Generator().manual_seed(derive(seed, "quickstart", "sums") % 2**63)
    for step in range(1, steps + 1):
        tokens_NT = _sums(randomness)
        logits_NTV = model(tokens_NT[:, :-1]).logits[:, -ANSWER_TOKENS:]
        targets_NT = tokens_NT[:, -ANSWER_TOKENS:]
        loss = cross_entropy(logits_NTV.flatten(0, 1), targets_NT.flatten(), ignore_index=VOCABULARY[PAD])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 4) == 0:
            say(f"pre-training: {step} of {steps} batches, cross-entropy {loss.item():.2f}")


def _sums(randomness: torch.Generator) -> Tensor:
    """Return a batch of sums with their answers as tokens, 7+8=15 or wrong: 7+8=5 without the carry, 2+3=6."""
    terms_N2 = torch.randint(10, (BATCH, 2), generator=randomness)
    right_N = terms_N2.sum(-1)
    wrong_N = torch.where(right_N >= 10, right_N - 10, right_N + 1)
    is_wrong_N = torch.rand(BATCH, generator=randomness) < WRONG_SHARE
    answers_N = torch.where(is_wrong_N, wrong_N, right_N)
    pairs = zip(terms_N2.tolist(), answers_N.tolist(), strict=True)
    return torch.tensor([_tokens(f"{a}+{b}=", str(answer)) for (a, b), answer in pairs])


def _tokens(prompt: str, answer: str) -> list[int]:
    written = [*prompt, *answer, END]
    return [VOCABULARY[token] for token in written] + [VOCABULARY[PAD]] * (len(prompt) + ANSWER_TOKENS - len(written))
