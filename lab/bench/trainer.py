"""Measure the exactness and speed of the trainer.

    python -m lab.bench.trainer exact     shared prefixes, micro-batches and presets, in float32: rows trainer.1.*
    python -m lab.bench.trainer speed     against a bare PyTorch loop and TRL, SmolLM2-135M in bfloat16: rows
                                          trainer.2.shared-*, trainer.2.plain-* and trainer.2.trl-*
    python -m lab.bench.trainer shapes    time and share of the matrix-product rate, by shape: rows trainer.2.shape-*
    python -m lab.bench.trainer memory    peak memory of a step against the bare loop: row trainer.2.memory

Minutes each. `--short` runs two rounds of a small batch and records nothing. Times are of whole steps; the arms take
turns in one process, and a ratio compares two steps of one turn.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from lab.bench.training_arms import Shape, bare_step, our_step, trl_step
from lab.figures import ROOT, Figure, command_parser, machine, record, show
from lab.fixtures.memory import peak_bytes, reset_peak
from lab.fixtures.pytest_runs import run_tests
from lab.parity.training_exactness import Case, Differences, compare_paths, small_case, smollm2_case

Arms = dict[str, Callable[[], None]]

SHORT_ANSWERS, LONG_ANSWERS = Shape(48, 24, 8, groups=8, together=8), Shape(128, 128, 8, groups=2, together=2)
TINY = Shape(16, 8, 2, groups=2, together=1)


def exact(short: bool) -> bool:
    """Rows trainer.1.*, except trainer.1.ranks."""
    cases: dict[str, Callable[[], Case]] = {"tiny": small_case}
    if not short:
        cases |= {"smollm2": smollm2_case, "smollm2-float64": partial(smollm2_case, torch.float64)}
    figures = [figure for name, case in cases.items() for figure in exactness_figures(name, compare_paths(*case()))]
    run = run_tests("tests/trainer/test_trainer.py", "-k", "NaiveTrainer or CuttingUp")
    figures.append(
        Figure(
            "trainer.1.naive",
            "every preset against a naive trainer (one completion at a time, full logits, AdamW by hand), 1 and 3 "
            "updates; any split, padding and sharing in float64",
            "all pass",
            run.last_line,
            "tests",
            run.ok,
            22,
            "gradient norm within 1e-5, update within 1e-3 of its norm: Adam divides by gradients that may be rounding",
        )
    )
    return finish(figures, short)


def exactness_figures(name: str, found: Differences) -> list[Figure]:
    setting = f"{name.removesuffix('-float64')}, {found.completions} completions"
    setting += ", float64" if name.endswith("float64") else ", float32"
    rounding = f"rounding: log-probs of plain rows alone differ by {found.rounding:.1e} between two splits of the batch"
    if name.endswith("float64"):
        rounding += "; norms are float32 inside, which rounds most differences away"
    return [
        Figure(
            f"trainer.1.{name}-logprobs",
            f"largest difference of log-probs, shared prefix against plain rows, {setting}",
            "<= 1e-5",
            float(f"{found.logprobs:.2g}"),
            "nats",
            found.logprobs <= 1e-5,
            found.tokens,
            rounding,
        ),
        Figure(
            f"trainer.1.{name}-gradients",
            f"relative difference of gradients, worst parameter, shared prefix against plain rows, {setting}",
            "<= 1e-4",
            float(f"{found.shared_gradients:.2g}"),
            "relative",
            found.shared_gradients <= 1e-4,
            found.tokens,
        ),
        Figure(
            f"trainer.1.{name}-splits",
            f"relative difference of loss and updated parameters, micro-batch splits against one, {setting}",
            "<= 1e-6",
            float(f"{max(found.split_loss, found.split_parameters):.2g}"),
            "relative",
            max(found.split_loss, found.split_parameters) <= 1e-6,
            found.splits,
            f"shared and plain rows; loss {found.split_loss:.1g}, parameters {found.split_parameters:.1g} (of the "
            f"largest weight of a tensor, at lr 1e-6), whole gradient {found.split_gradient:.1g} of its norm; "
            f"{rounding}",
        ),
    ]


class Time(NamedTuple):
    """Seconds of one step."""

    wall: float
    processor: float
    """Processor time, which other processes disturb less."""


Times = dict[str, list[Time]]


def alternate(arms: Arms, rounds: int) -> Times:
    """Time the steps of every arm, all arms in each turn. The first turn warms up and does not count."""
    times: Times = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, step in arms.items():
            start = Time(time.perf_counter(), time.process_time())
            step()
            taken = Time(time.perf_counter() - start.wall, time.process_time() - start.processor)
            if turn:
                times[name].append(taken)
                print(f"  {name:<14} {taken.wall:7.2f} s, processor {taken.processor:7.2f} s", flush=True)
    return times


def ratios(times: Times, over: str, under: str) -> list[float]:
    return [a.wall / b.wall for a, b in zip(times[over], times[under], strict=True)]


def by_processor(times: Times, over: str, under: str) -> str:
    ratio = median(t.processor for t in times[over]) / median(t.processor for t in times[under])
    return f"by processor time {ratio:.2f}"


def spread(values: list[float]) -> str:
    return f"range {min(values):.2f} to {max(values):.2f}"


def speed(short: bool) -> bool:
    """Rows trainer.2.shared-*, .plain-* and .trl-*: against a bare loop and TRL."""
    figures = []
    for shape, goal in ((TINY, 0.0),) if short else ((SHORT_ANSWERS, 2.3), (LONG_ANSWERS, 1.4)):
        print(f"prompt/completion/G {shape.name}, {shape.groups} groups, {shape.together} in a micro-batch")
        arms = {
            "bare": bare_step(shape),
            "shared": our_step(shape, shared=True),
            "plain": our_step(shape, shared=False),
            "bare, eager": bare_step(shape, "eager"),
            "trl": trl_step(shape),
        }
        times = alternate(arms, 2 if short else 5)
        pairs = (("bare", "shared"), ("plain", "bare"), ("trl", "shared"))
        faster, plain, trl = (ratios(times, *pair) for pair in pairs)
        notes = [f"median of turns, {spread(ratios(times, *p))}, {by_processor(times, *p)}" for p in pairs]
        eager = median(ratios(times, "bare, eager", "shared"))
        slug, n = shape.name.replace("/", "-"), len(faster)
        figures += [
            Figure(
                f"trainer.2.shared-{slug}",
                f"a bare PyTorch loop's time over ours with shared prefixes, prompt/completion/G {shape.name}, bf16",
                f">= {goal}",
                round(median(faster), 2),
                "times faster",
                median(faster) >= goal,
                n,
                f"{notes[0]}; against the loop with eager attention {eager:.2f}; 2 threads, {machine()}",
            ),
            Figure(
                f"trainer.2.plain-{slug}",
                f"our time without sharing over the bare loop's, prompt/completion/G {shape.name}, bfloat16",
                "<= 1.05",
                round(median(plain), 3),
                "ratio",
                median(plain) <= 1.05,
                n,
                f"{notes[1]}; includes credit, packing and metrics, and the backward pass computes the product of the "
                f"head again, since logits are not kept; 2 threads, {machine()}",
            ),
            Figure(
                f"trainer.2.trl-{slug}",
                f"TRL 1.16's training half over our step with shared prefixes, prompt/completion/G {shape.name}",
                ">= 3",
                round(median(trl), 2),
                "times faster",
                median(trl) >= 3,
                n,
                f"{notes[2]}; compute_loss, backward, AdamW; default autocast, no checkpoints; 2 threads, {machine()}",
            ),
        ]
    return finish(figures, short)


def shapes(short: bool) -> bool:
    """Rows trainer.2.shape-*."""
    table = [TINY] if short else [
        Shape(48, 24, 8, 8, 8), Shape(48, 24, 16, 4, 4), Shape(128, 128, 8, 2, 2), Shape(512, 32, 8, 2, 2),
        Shape(32, 256, 4, 2, 2),
    ]  # fmt: skip
    figures = []
    for shape in table:
        arms = {"shared": our_step(shape, shared=True), "plain": our_step(shape, shared=False)}
        rate = matmul_rate()
        times = alternate(arms, 2 if short else 3)
        seconds = {name: median(t.wall for t in taken) for name, taken in times.items()}
        reached = {name: shape.flops(shared=name == "shared") / s / rate for name, s in seconds.items()}
        figures.append(
            Figure(
                f"trainer.2.shape-{shape.name.replace('/', '-')}",
                f"a step on {shape.groups} groups, prompt/completion/G {shape.name}, shared prefix over plain rows",
                "reported",
                round(seconds["plain"] / seconds["shared"], 2),
                "times faster",
                True,
                2 if short else 3,
                f"{seconds['shared']:.1f} s shared ({reached['shared']:.0%} of a measured {rate / 1e12:.2f} TFLOP/s of "
                f"bf16 products), {seconds['plain']:.1f} s plain ({reached['plain']:.0%}); 2 threads, {machine()}",
            )
        )
    return finish(figures, short)


def matmul_rate() -> float:
    """Return the floating-point operations a second of a large bfloat16 product, the median of nine."""
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / median(times)


def memory(short: bool) -> bool:
    """Row trainer.2.memory: the peak of a step above the memory before it, in a process for each."""
    shape = TINY if short else LONG_ANSWERS
    peaks = {
        arm: [
            int(subprocess.run([sys.executable, "-m", "lab.bench.trainer", "peak", arm, *["--short"][: int(short)]],
                               check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()[-1])
            for _ in range(1 if short else 3)
        ]
        for arm in ("bare", "shared")
    }  # fmt: skip
    ratio = median(peaks["shared"]) / median(peaks["bare"])
    gigabytes = {arm: f"{median(values) / 1e9:.2f} GB" for arm, values in peaks.items()}
    figures = [
        Figure(
            "trainer.2.memory",
            f"peak memory of our step over the bare loop's, the same {shape.together * shape.size} completions in a "
            f"micro-batch, prompt/completion/G {shape.name}",
            "<= 0.6",
            round(ratio, 3),
            "ratio",
            ratio <= 0.6,
            len(peaks["bare"]),
            f"{gigabytes['shared']} against {gigabytes['bare']} above weights, masters and moments; gradients included",
        )
    ]
    return finish(figures, short)


def peak(arm: str, short: bool) -> None:
    """Print the bytes that a step of an arm adds at its peak."""
    shape = TINY if short else LONG_ANSWERS
    step = bare_step(shape) if arm == "bare" else our_step(shape, shared=True)
    reset_peak()
    before = peak_bytes()
    step()
    print(peak_bytes() - before)


def finish(figures: list[Figure], short: bool) -> bool:
    """Record the figures of a full run. In a short run only exactness counts: it is too small to measure speed."""
    if not short:
        return record(*figures)
    show(*figures)
    return all(figure.holds for figure in figures if figure.id.startswith("trainer.1."))


if __name__ == "__main__":
    parser = command_parser(__doc__, short="two rounds of a small batch; record nothing")
    parser.add_argument("command", choices=["exact", "speed", "shapes", "memory", "peak"], help="peak is internal")
    parser.add_argument("arm", nargs="?", help="internal: which arm peak measures")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.command == "peak":
        peak(arguments.arm, arguments.short)
    else:
        commands = {"exact": exact, "speed": speed, "shapes": shapes, "memory": memory}
        sys.exit(not commands[arguments.command](arguments.short))
