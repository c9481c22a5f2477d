"""The model of the learning figures: 90,000 parameters that write sums and get most of them wrong.

    python -m lab.learning.model    print the directory; the first call makes it, in half a minute on one core

The model is kept outside the repository.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from lab.figures import command_parser
from lab.fixtures.tiny_model import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CACHE: Final = Path.home() / ".cache" / "offbeat" / "sums"
BATCHES: Final = 1000
ROWS: Final = 128
WRONG: Final = 0.8
"""Share of the training answers that are off by one of `SLIPS`: what RL can improve."""
SLIPS: Final = (-10, -1, 1, 10)
IGNORED: Final = -100


def directory() -> Path:
    """Return the model directory. The first call makes it."""
    if not CACHE.exists():
        part = CACHE.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_tokenizer(part)
        pretrain(part).save_pretrained(part)
        part.rename(CACHE)
    return CACHE


def pretrain(tokenizer_in: Path, batches: int = BATCHES) -> "LlamaForCausalLM":
    """Train a new model on sums whose answers are mostly wrong."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer(tokenizer_in)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters=batches)
    for _ in range(batches):
        terms_N2 = torch.randint(0, 10, (ROWS, 2))
        slips_N = torch.where(torch.rand(ROWS) < WRONG, torch.tensor(SLIPS)[torch.randint(4, (ROWS,))], 0)
        answers_N = (terms_N2.sum(-1) + slips_N).abs()
        texts = [f"{a}+{b}={answer}" for (a, b), answer in zip(terms_N2.tolist(), answers_N.tolist(), strict=True)]
        ids_NT, labels_NT = _rows([tokenizer.encode(text) for text in texts], tokenizer.eos_token_id)
        optimizer.zero_grad()
        model(input_ids=ids_NT, labels=labels_NT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def _rows(sums: list[list[int]], end: int) -> tuple[Tensor, Tensor]:
    """Return the tokens, and as labels those of the answer and its end."""
    prompt, longest = len("1+1="), max(map(len, sums)) + 1
    ids_NT = torch.tensor([one + [end] * (longest - len(one)) for one in sums])
    ends_N = torch.tensor([len(one) for one in sums])
    places_T = torch.arange(longest)
    answer_NT = (places_T >= prompt) & (places_T <= ends_N[:, None])
    return ids_NT, torch.where(answer_NT, ids_NT, IGNORED)


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    print(directory())
