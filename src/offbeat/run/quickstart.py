"""A model to begin with, made on the spot: no download, no account, no GPU.

It is a Llama of 0.1 M parameters that reads characters, pre-trained on one-digit sums by someone who mostly gets them
wrong. It knows how sums are written, and is right about four times in ten: room to learn.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from offbeat.seeds import derive

PAD, END = "<pad>", "<end>"
VOCABULARY: Final = {token: number for number, token in enumerate([PAD, END, *"0123456789+="])}
SLIPS: Final = 0.6
"""Share of wrong answers in pre-training: what is left for RL to mend."""
ANSWER_TOKENS: Final = 3
"""Two digits and the end."""
BATCH: Final = 128


def make_model(directory: Path, *, steps: int = 800, seed: int = 0, say: Callable[[str], None] = print) -> None:
    """Pre-train and save model and tokenizer as a Hugging Face directory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     make_model(Path(place), steps=1, say=lambda line: None)
    ...     sorted(file.name for file in Path(place).glob("*.safetensors"))
    ['model.safetensors']

    Args:
        directory: Made where it does not exist.
        steps: Batches of pre-training: about ten seconds on one core.
        seed: Of weights and of the sums it reads.
        say: Is given a line of progress now and then.
    """
    torch.manual_seed(derive(seed, "quickstart", "model"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=VOCABULARY[END],
            pad_token_id=VOCABULARY[PAD],
        )
    )
    _pretrain(model, steps, seed, say)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character.

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
    """Sums with their answers, some of them off by one or by ten, as tokens."""
    terms_N2 = torch.randint(10, (BATCH, 2), generator=randomness)
    slips_N = torch.tensor([-10, -1, 1, 10])[torch.randint(4, (BATCH,), generator=randomness)]
    slipped_N = torch.rand(BATCH, generator=randomness) < SLIPS
    said_N = (terms_N2.sum(-1) + torch.where(slipped_N, slips_N, 0)) % 100
    return torch.tensor(
        [_tokens(f"{a}+{b}=", str(said)) for (a, b), said in zip(terms_N2.tolist(), said_N.tolist(), strict=True)]
    )


def _tokens(prompt: str, answer: str) -> list[int]:
    written = [*prompt, *answer, END]
    return [VOCABULARY[token] for token in written] + [VOCABULARY[PAD]] * (len(prompt) + ANSWER_TOKENS - len(written))
