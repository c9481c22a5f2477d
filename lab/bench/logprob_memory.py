"""Compare log-probs in chunks with full logits: the numbers, and the peak memory of each in a process of its own.

    python -m lab.bench.logprob_memory    minutes; writes rows foundation.3.*

The peak is the kernel's high-water mark of resident memory, less what was resident before the forward pass.
"""

import subprocess
import sys
from statistics import median

import torch
from torch import Tensor

from lab.figures import ROOT, Figure, command_parser, record
from offbeat.objective.logprobs import token_stats
from tests.fixtures.memory import peak_bytes, reset_peak


def example(vocabulary: int, tokens: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, head and token ids. Logits have unit variance: wider ones make denormal probabilities."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, generator=generator) / hidden_size**0.5).requires_grad_()
    return hidden, head, torch.randint(0, vocabulary, (tokens,), generator=generator)


def measure(kind: str, vocabulary: int, tokens: int, hidden_size: int) -> int:
    """Return the bytes that forward and backward pass add at their peak. Call it in a fresh process."""
    torch.set_num_threads(1)  # memory is measured, not time, so one core is enough
    hidden, head, ids = example(vocabulary, tokens, hidden_size)
    token_stats(hidden[:8], head, ids[:8]).logprobs.sum().backward()  # libraries and buffers, before counting starts
    hidden.grad = head.grad = None
    reset_peak()
    before = peak_bytes()
    if kind == "chunked":
        logprobs = token_stats(hidden, head, ids).logprobs
    else:
        logprobs = torch.log_softmax(hidden @ head.T, -1).gather(-1, ids[:, None]).squeeze(-1)
    logprobs.sum().backward()
    return peak_bytes() - before


def largest_differences(vocabulary: int, tokens: int, hidden_size: int) -> tuple[float, float]:
    """Compare with full logits in float32. Return the relative differences of log-probs and of the worse gradient."""
    hidden, head, ids = example(vocabulary, tokens, hidden_size)
    full = torch.log_softmax(hidden @ head.T, -1).gather(-1, ids[:, None]).squeeze(-1)
    ours = token_stats(hidden, head, ids).logprobs
    weights = torch.randn(tokens, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((weights * full).sum(), (hidden, head))
    found = torch.autograd.grad((weights * ours).sum(), (hidden, head))
    gradients = [float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
    return float(((ours - full) / full).detach().abs().max()), max(gradients)


def peak(kind: str, vocabulary: int, tokens: int, hidden: int) -> int:
    """Call `measure` in a fresh process."""
    sizes = [str(size) for size in (vocabulary, tokens, hidden)]
    command = [sys.executable, "-m", "lab.bench.logprob_memory", "--measure", kind, *sizes]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def peak_ratio(vocabulary: int, tokens: int, hidden: int) -> float:
    """Return the peak of the chunked version over the peak with full logits."""
    return peak("chunked", vocabulary, tokens, hidden) / peak("full", vocabulary, tokens, hidden)


def main() -> bool:
    """Measure at the sizes of SmolLM2-135M."""
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
    parser = command_parser(__doc__)
    sizes_help = "internal: print the peak of one kind (chunked or full) in this process"
    parser.add_argument("--measure", nargs=4, metavar=("KIND", "VOCABULARY", "TOKENS", "HIDDEN"), help=sizes_help)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, *sizes = arguments.measure
        print(measure(kind, *map(int, sizes)))
    else:
        sys.exit(not main())
