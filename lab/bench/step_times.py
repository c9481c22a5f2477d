"""Times of the steps of several arms that take turns, and the rate of matrix products beside them."""

import time
from collections.abc import Callable
from statistics import median
from typing import Final, NamedTuple

import torch

from lab.bench.training_arms import DTYPE

Arms = dict[str, Callable[[], None]]

WIDTH: Final = 2048
PRODUCTS: Final = 9


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


def matmul_rate() -> float:
    """Return the floating-point operations a second of a large product in `DTYPE`, the median of nine."""
    product, times = matrix_products(1), []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return product_flops(1) / median(times)


def matrix_products(count: int) -> Callable[[], None]:
    """Return a step that does nothing but `count` large products in `DTYPE`."""
    a, b = (torch.randn(WIDTH, WIDTH).to(DTYPE) for _ in range(2))

    def step() -> None:
        for _ in range(count):
            a @ b

    return step


def product_flops(count: int) -> float:
    return count * 2.0 * WIDTH**3
