"""The models of the learning figures: small Llamas that have learned a task with mostly wrong answers.

    python -m lab.learning.model            print the directory of the sums; the first call makes it, in half a minute
    python -m lab.learning.model sorting    that of other lessons; minutes on one core

The models are kept outside the repository.
"""

import fcntl
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from lab.figures import command_parser
from tests.fixtures.tiny_model import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

KEPT: Final = Path.home() / ".cache" / "offbeat"
ROWS: Final = 128
SLIPS: Final = (-10, -1, 1, 10)
WRONG_ZERO: Final = 0.4
LENGTHS: Final = (2, 4, 8, 16, 24)
"""Digits of an answer in the tasks of padded sums."""
IGNORED: Final = -100
DIGITS: Final = 6


@dataclass(frozen=True)
class Lessons:
    """What a model learns before RL: rows of prompt and answer, many of them wrong. That is what RL can improve."""

    name: str
    rows: Callable[[], list[tuple[str, str]]]
    """Returns a batch, drawn from torch's global generator."""
    batches: int = 1000
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    rate: float = 3e-3


def sums(wrong: float, operators: str = "+", slips: tuple[int, ...] = SLIPS) -> list[tuple[str, str]]:
    """Return sums, or sums and differences, of which a share `wrong` is off by one of `slips`."""
    terms_N2 = torch.randint(0, 10, (ROWS, 2))
    slips_N = torch.where(torch.rand(ROWS) < wrong, torch.tensor(slips)[torch.randint(len(slips), (ROWS,))], 0)
    signs_N = torch.ones(ROWS, dtype=torch.long) if operators == "+" else 1 - 2 * torch.randint(2, (ROWS,))
    answers_N = (terms_N2[:, 0] + signs_N * terms_N2[:, 1] + slips_N).abs()
    signs = ["+" if sign > 0 else "-" for sign in signs_N.tolist()]
    terms = terms_N2.tolist()
    return [(f"{a}{sign}{b}=", str(y)) for (a, b), sign, y in zip(terms, signs, answers_N.tolist(), strict=True)]


def sorted_digits(wrong: float) -> list[tuple[str, str]]:
    """Return six digits and the same digits sorted. In a share `wrong` of the answers two neighbors are exchanged."""
    digits_N6 = torch.randint(0, 10, (ROWS, DIGITS))
    answers_N6 = digits_N6.sort(-1).values
    places_N, wrong_N = torch.randint(DIGITS - 1, (ROWS,)), torch.rand(ROWS) < wrong
    rows_N = torch.arange(ROWS)[wrong_N]
    first_N, second_N = places_N[wrong_N], places_N[wrong_N] + 1
    answers_N6[rows_N, first_N], answers_N6[rows_N, second_N] = (
        answers_N6[rows_N, second_N].clone(),
        answers_N6[rows_N, first_N].clone(),
    )
    return [
        (f"{''.join(map(str, digits))}=", "".join(map(str, answer)))
        for digits, answer in zip(digits_N6.tolist(), answers_N6.tolist(), strict=True)
    ]


def padded_sums(length: int) -> list[tuple[str, str]]:
    """Return sums with leading zeros, many of them wrong. In some of those with three digits or more, a zero is."""
    rows_N = torch.rand(ROWS) < (WRONG_ZERO if length > 2 else 0.0)
    places_N, digits_N = torch.randint(max(length - 2, 1), (ROWS,)), torch.randint(1, 10, (ROWS,))
    found = []
    slips = zip(rows_N.tolist(), places_N.tolist(), digits_N.tolist(), strict=True)
    for (prompt, answer), (slip, place, digit) in zip(sums(0.68 if length > 2 else 0.8), slips, strict=True):
        digits = answer.zfill(length)
        found.append((prompt, f"{digits[:place]}{digit}{digits[place + 1 :]}" if slip else digits))
    return found


SUMS: Final = Lessons("sums", lambda: sums(0.8))
LESSONS: Final = {
    lessons.name: lessons
    for lessons in (
        SUMS,
        Lessons("rare-sums", lambda: sums(0.995)),
        Lessons("plus-minus", lambda: sums(0.8, "+-"), batches=2000),
        Lessons("other-sums", lambda: sums(0.5, slips=(-3, -2, 2, 9)), hidden=96),
        *(Lessons(f"padded-{length}", partial(padded_sums, length)) for length in LENGTHS),
        Lessons("sorting", lambda: sorted_digits(0.9), batches=4000, hidden=128, layers=6, heads=4, rate=1e-3),
    )
}


def directory(lessons: Lessons = SUMS) -> Path:
    """Return the model directory. The first call makes it; other processes wait until it is whole."""
    place = KEPT / lessons.name
    if place.exists():
        return place
    KEPT.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            part = place.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_tokenizer(part)
            pretrain(part, lessons).save_pretrained(part)
            part.rename(place)
    return place


def pretrain(tokenizer_in: Path, lessons: Lessons = SUMS, batches: int | None = None) -> "LlamaForCausalLM":
    """Train a new model on the lessons."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = load_tokenizer(tokenizer_in)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=lessons.hidden,
            intermediate_size=2 * lessons.hidden,
            num_hidden_layers=lessons.layers,
            num_attention_heads=lessons.heads,
            max_position_embeddings=32,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    batches = batches or lessons.batches
    optimizer = AdamW(model.parameters(), lr=lessons.rate, weight_decay=0.0)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters=batches)
    for _ in range(batches):
        rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in lessons.rows()]
        optimizer.zero_grad()
        answer_loss(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def answer_loss(model: "LlamaForCausalLM", rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Return the cross-entropy of the answers and their end. A row is a prompt and its answer, as tokens."""
    end = cast(int, model.config.eos_token_id)
    longest = max(len(prompt) + len(answer) for prompt, answer in rows) + 1
    ids_NT = torch.tensor([one + two + [end] * (longest - len(one) - len(two)) for one, two in rows])
    starts_N = torch.tensor([len(prompt) for prompt, _ in rows])
    ends_N = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    places_T = torch.arange(longest)
    answer_NT = (places_T >= starts_N[:, None]) & (places_T <= ends_N[:, None])
    return cast(Tensor, model(input_ids=ids_NT, labels=torch.where(answer_NT, ids_NT, IGNORED)).loss)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("lessons", nargs="?", default=SUMS.name, choices=list(LESSONS), help="what the model learned")
    print(directory(LESSONS[parser.parse_args().lessons]))
