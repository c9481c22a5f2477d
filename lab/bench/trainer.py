"""Measure the exactness and speed of the trainer.

    python -m lab.bench.trainer exact     shared prefixes, micro-batches and presets, in float32: rows trainer.1.*
    python -m lab.bench.trainer speed     against a bare PyTorch loop and TRL, SmolLM2-135M: rows trainer.2.shared-*,
                                          trainer.2.trl-* and trainer.2.plain-128-128-8
    python -m lab.bench.trainer limit     a step against the rate of matrix products, the cores it uses, and a step
                                          without sharing against the bare loop, 20 rounds: rows throughput.3.flops,
                                          throughput.3.cores and trainer.2.plain-48-24-8; 10 minutes
    python -m lab.bench.trainer shapes    time and share of the matrix-product rate, by shape: rows trainer.2.shape-*
    python -m lab.bench.trainer memory    peak memory of a step against the bare loop: row trainer.2.memory

Minutes each. `--short` runs two rounds of a small batch and records nothing. Times are of whole steps; the arms take
turns in one process, and a ratio compares two steps of one turn.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Final

import torch

from lab.bench import step_times
from lab.bench.step_times import Times, alternate, by_processor, product_flops, ratios, spread
from lab.bench.training_arms import DTYPE_NAME, Shape, bare_step, our_step, trl_step
from lab.figures import ROOT, Figure, command_parser, machine, record, show
from lab.fixtures.pytest_runs import run_tests
from lab.parity.training_exactness import Case, Differences, compare_paths, small_case, smollm2_case
from offbeat.trainer.allocator import keep_freed_memory
from tests.fixtures.memory import peak_bytes, reset_peak

SHORT_ANSWERS, LONG_ANSWERS = Shape(48, 24, 8, groups=8, together=8), Shape(128, 128, 8, groups=2, together=2)
TINY = Shape(16, 8, 2, groups=2, together=1)
LIMIT_SHAPE = Shape(48, 24, 8, groups=3, together=3)
"""With three groups, 20 rounds take ten minutes on two cores."""


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


def speed(short: bool) -> bool:
    """Rows trainer.2.shared-*, .plain-128-128-8 and .trl-*: against a bare loop and TRL."""
    figures = []
    for shape, goal in ((TINY, 0.0),) if short else ((SHORT_ANSWERS, 2.3), (LONG_ANSWERS, 1.4)):
        print(f"prompt/completion/G {shape.name}, {shape.groups} groups, {shape.together} in a micro-batch")
        arms = {
            "bare": bare_step(shape),
            "shared": our_step(shape, shared=True),
            **({} if shape is SHORT_ANSWERS else {"plain": our_step(shape, shared=False)}),  # `limit` has that row
            "bare, eager": bare_step(shape, "eager"),
            "trl": trl_step(shape),
        }
        times = alternate(arms, 2 if short else 5)
        faster, trl = ratios(times, "bare", "shared"), ratios(times, "trl", "shared")
        eager = median(ratios(times, "bare, eager", "shared"))
        slug, n = shape.slug, len(faster)
        figures += [
            Figure(
                f"trainer.2.shared-{slug}",
                f"a bare PyTorch loop's time over ours with shared prefixes, prompt/completion/G {shape.name}, "
                f"{DTYPE_NAME}",
                f">= {goal}",
                round(median(faster), 2),
                "times faster",
                median(faster) >= goal,
                n,
                f"{compared(times, 'bare', 'shared')}; against the loop with eager attention {eager:.2f}; "
                f"2 threads, {machine()}",
            ),
            Figure(
                f"trainer.2.trl-{slug}",
                f"TRL 1.16's training half over our step with shared prefixes, prompt/completion/G {shape.name}, "
                f"{DTYPE_NAME}",
                ">= 3",
                round(median(trl), 2),
                "times faster",
                median(trl) >= 3,
                n,
                f"{compared(times, 'trl', 'shared')}; compute_loss, backward, AdamW; no checkpoints; "
                f"2 threads, {machine()}",
            ),
        ]
        if "plain" in times:
            figures.append(plain_figure(shape, times))
    return finish(figures, short)


def compared(times: Times, over: str, under: str) -> str:
    return f"median of turns, {spread(ratios(times, over, under))}, {by_processor(times, over, under)}"


def plain_figure(shape: Shape, times: Times) -> Figure:
    """Return the row trainer.2.plain-* of a shape."""
    plain = ratios(times, "plain", "bare")
    return Figure(
        f"trainer.2.plain-{shape.slug}",
        f"our time without sharing over the bare loop's, prompt/completion/G {shape.name}, {DTYPE_NAME}",
        "<= 1.05",
        round(median(plain), 3),
        "ratio",
        median(plain) <= 1.05,
        len(plain),
        f"{compared(times, 'plain', 'bare')}; {shape.groups} groups; includes credit, packing and metrics; "
        f"2 threads, {machine()}",
    )


def limit(short: bool) -> bool:
    """Rows throughput.3.flops, throughput.3.cores and trainer.2.plain-48-24-8."""
    shape = TINY if short else LIMIT_SHAPE
    keep_freed_memory()  # as in a run on CPU; it holds for the whole process, hence for the bare loop too
    arms = {
        "products": step_times.matrix_products(step_times.PRODUCTS),
        "shared": our_step(shape, shared=True),
        "plain": our_step(shape, shared=False),
        "bare": bare_step(shape),
    }
    times = alternate(arms, 2 if short else 20)
    # The time of the step's own products, at the rate that the round has measured with others.
    products = product_flops(step_times.PRODUCTS)
    scale = shape.flops(shared=True) / products
    flops = [ratio / scale for ratio in ratios(times, "shared", "products")]
    cores = [one.processor / one.wall for one in times["shared"]]
    on_processor = median(one.processor for one in times["shared"]) / scale
    on_processor /= median(one.processor for one in times["products"])
    rate = products / median(one.wall for one in times["products"])
    what = f"a step on {shape.groups} groups with shared prefixes, prompt/completion/G {shape.name}, {DTYPE_NAME}"
    figures = [
        Figure(
            "throughput.3.flops",
            f"{what}: its time over that of its matrix products at the measured rate",
            "<= 2.0",
            round(median(flops), 2),
            "ratio",
            median(flops) <= 2.0,
            len(flops),
            f"median of rounds, {spread(flops)}, by processor time {on_processor:.2f}; "
            f"{median(one.wall for one in times['shared']):.2f} s for {shape.flops(shared=True) / 1e12:.2f} TFLOP, "
            f"products at {rate / 1e9:.0f} GFLOP/s, measured in every round; freed memory kept, as in a run; "
            f"2 threads, {machine()}",
        ),
        Figure(
            "throughput.3.cores",
            f"{what}: processor time over wall time",
            ">= 1.8 of 2",
            round(median(cores), 2),
            "cores",
            median(cores) >= 1.8,
            len(cores),
            f"median of rounds, {spread(cores)}; matrix products alone "
            f"{median(one.processor / one.wall for one in times['products']):.2f}; the rest of a step keeps "
            f"one core waiting; 2 threads, {machine()}",
        ),
        plain_figure(shape, times),
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
        rate = step_times.matmul_rate()
        times = alternate(arms, 2 if short else 3)
        seconds = {name: median(t.wall for t in taken) for name, taken in times.items()}
        reached = {name: shape.flops(shared=name == "shared") / s / rate for name, s in seconds.items()}
        figures.append(
            Figure(
                f"trainer.2.shape-{shape.slug}",
                f"a step on {shape.groups} groups, prompt/completion/G {shape.name}, shared prefix over plain rows, "
                f"{DTYPE_NAME}",
                "reported",
                round(seconds["plain"] / seconds["shared"], 2),
                "times faster",
                True,
                2 if short else 3,
                f"{seconds['shared']:.1f} s shared ({reached['shared']:.0%} of a measured {rate / 1e12:.2f} TFLOP/s of "
                f"{DTYPE_NAME} products), {seconds['plain']:.1f} s plain ({reached['plain']:.0%}); "
                f"2 threads, {machine()}",
            )
        )
    return finish(figures, short)


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
            f"micro-batch, prompt/completion/G {shape.name}, {DTYPE_NAME}",
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


COMMANDS: Final = {"exact": exact, "speed": speed, "limit": limit, "shapes": shapes, "memory": memory}

if __name__ == "__main__":
    parser = command_parser(__doc__, short="two rounds of a small batch; record nothing")
    parser.add_argument("command", choices=[*COMMANDS, "peak"], help="peak is internal")
    parser.add_argument("arm", nargs="?", help="internal: which arm peak measures")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.command == "peak":
        peak(arguments.arm, arguments.short)
    else:
        sys.exit(not COMMANDS[arguments.command](arguments.short))
