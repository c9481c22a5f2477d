"""Log-probs in chunks against full logits: the same numbers, and the peak memory of each in a process of its own.

    python -m lab.bench.logprob_memory

The peak is the kernel's high-water mark of resident memory, less what was resident before the forward pass.
"""

import argparse
import subprocess
import sys
from statistics import median

import torch
from torch import Tensor

from lab.figures import ROOT, Figure, record
from offbeat.objective.logprobs import token_stats


def example(vocabulary: int, tokens: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and token ids; unit-variance logits, as far wider ones make denormal probabilities."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_()
    return hidden, head, torch.randint(0, vocabulary, (tokens,), generator=generator)


def measure(kind: str, vocabulary: int, tokens: int, hidden_size: int) -> int:
    """Bytes that forward and backward add at their peak; to be called in a fresh process."""
    torch.set_num_threads(1)  # memory is measured, not time: leave the other core to whoever has it
    hidden, head, ids = example(vocabulary, tokens, hidden_size)
    token_stats(hidden[:8], head, ids[:8]).logprobs.sum().backward()  # libraries and buffers, before counting starts
    hidden.grad = head.grad = None
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = high_water_mark()
    if kind == "chunked":
        logprobs = token_stats(hidden, head, ids).logprobs
    else:
        logprobs = torch.log_softmax(hidden @ head.T, -1).gather(-1, ids[:, None]).squeeze(-1)
    logprobs.sum().backward()
    return high_water_mark() - before


def largest_differences(vocabulary: int, tokens: int, hidden_size: int) -> tuple[float, float]:
    """Ours against full logits in float32: relative differences of log-probs, and of the worse gradient."""
    hidden, head, ids = example(vocabulary, tokens, hidden_size)
    full = torch.log_softmax(hidden @ head.T, -1).gather(-1, ids[:, None]).squeeze(-1)
    ours = token_stats(hidden, head, ids).logprobs
    weights = torch.randn(tokens, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((weights * full).sum(), (hidden, head))
    found = torch.autograd.grad((weights * ours).sum(), (hidden, head))
    gradients = [float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
    return float(((ours - full) / full).detach().abs().max()), max(gradients)


def high_water_mark() -> int:
    """VmHWM of this process, in bytes."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def peak(kind: str, vocabulary: int, tokens: int, hidden: int) -> int:
    """`measure` in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "lab.bench.logprob_memory",
        "--measure",
        kind,
        str(vocabulary),
        str(tokens),
        str(hidden),
    ]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def peak_ratio(vocabulary: int, tokens: int, hidden: int) -> float:
    """Peak of the chunked version over the peak with full logits."""
    return peak("chunked", vocabulary, tokens, hidden) / peak("full", vocabulary, tokens, hidden)


def main() -> bool:
    """Measure at SmolLM2-135M's sizes and record."""
    vocabulary, tokens, hidden, rounds = 49_152, 4_096, 576, 3
    ratios = [peak_ratio(vocabulary, tokens, hidden) for _ in range(rounds)]
    forward, backward = largest_differences(vocabulary, tokens, hidden)
    sizes = f"vocabulary {vocabulary:,}, {tokens:,} tokens"
    return record(
        Figure(
            "foundation.3.forward",
            f"largest relative difference of chunked log-probs from full logits, float32, {sizes}",
            "<= 1e-6",
            float(f"{forward:.2g}"),
            "relative",
            forward <= 1e-6,
            tokens,
        ),
        Figure(
            "foundation.3.backward",
            f"relative difference of gradients (the worse of hidden states and head), float32, {sizes}",
            "<= 1e-6",
            float(f"{backward:.2g}"),
            "relative",
            backward <= 1e-6,
            2,
        ),
        Figure(
            "foundation.3.memory",
            f"peak memory of chunked log-probs over full logits, {sizes}",
            "< 0.25",
            round(median(ratios), 4),
            "ratio",
            max(ratios) < 0.25,
            rounds,
            f"hidden {hidden}, float32, forward and backward, head gradient included; "
            f"range {min(ratios):.3f} to {max(ratios):.3f}",
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=4, metavar=("KIND", "VOCABULARY", "TOKENS", "HIDDEN"), help="internal")
    arguments = parser.parse_args()
    if arguments.measure:
        kind, *sizes = arguments.measure
        print(measure(kind, *map(int, sizes)))
    else:
        sys.exit(not main())
