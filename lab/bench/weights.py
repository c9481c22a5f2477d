"""Measure what a publish costs, in bytes and in time, on SmolLM2-135M under real policy-gradient steps.

    python -m lab.bench.weights size            20 steps at each of two learning rates: rows weights-rollout.2.size-*
    python -m lab.bench.weights time            12 steps: rows weights-rollout.2.time, .anchor and .fetch; needs a quiet
                                                machine
    python -m lab.bench.weights size --short    2 steps; nothing is recorded

Minutes each. After each step, the bf16 state is published to one log for each v that divides the step number, so a
patch of that log holds v steps. The log with v = 1 is timed against writing the same state as a safetensors file with
the same durability (fsync of file and folder), in alternating order.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.figures import Figure, command_parser, report
from lab.fixtures.smollm2_steps import ABOUT, PolicySteps
from offbeat.weights.publisher import Published, WeightLog
from offbeat.weights.subscriber import Subscription

PERIODS = (1, 2, 5, 10, 20)
GOALS = {("1e-6", 1): 0.8, ("1e-6", 10): 4.0}
"""Percent of the full size."""
LOADED = 2.5
"""A load average above this means that other processes used the two cores as well."""


@dataclass
class Measured:
    """The measurements at one learning rate."""

    full_bytes: int = 0
    published: dict[int, list[Published]] = field(default_factory=lambda: defaultdict(list))
    """By v; only patches."""
    publish_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    """Processor time of each publish, over all its threads."""
    anchor_seconds: list[float] = field(default_factory=list)
    fetch_seconds: list[float] = field(default_factory=list)
    join_seconds: float = 0.0


def time_full_write(state: dict[str, Tensor], path: Path) -> float:
    """Return the seconds to write the state as one safetensors file that survives a power cut."""
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    save_file(state, path)
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - began


def time_publish(log: WeightLog, version: int, state: dict[str, Tensor]) -> tuple[float, Published]:
    """Publish. Return the seconds of the whole publish, and its result."""
    began = time.perf_counter()
    result = log.publish(version, state.items())
    return time.perf_counter() - began, result


def measure(learning_rate: str, steps: int, periods: tuple[int, ...]) -> Measured:
    """Train, and publish to one log for each v."""
    policy, seen = PolicySteps(float(learning_rate)), Measured()
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as temporary, ExitStack() as stack:
        place = Path(temporary)
        opened = {v: WeightLog.open(place / f"v{v}", anchor_every=1000) for v in periods}
        logs = {v: stack.enter_context(log) for v, log in opened.items()}
        reader = stack.enter_context(Subscription.open(place / "v1", name="bench"))
        state = policy.serving()
        for log in logs.values():
            seconds, _ = time_publish(log, 0, state)
            seen.anchor_seconds.append(seconds)
        time_full_write(state, place / "full.safetensors")  # warms up
        seen.full_bytes = (place / "full.safetensors").stat().st_size
        reader.fetch(0)
        for step in range(1, steps + 1):
            reward = policy.step()
            state = policy.serving()
            _time_one(seen, logs[1], step, state, place)
            for v in periods[1:]:
                if step % v == 0:
                    seen.published[v].append(time_publish(logs[v], step, state)[1])
            began = time.perf_counter()
            reader.fetch(step)
            seen.fetch_seconds.append(time.perf_counter() - began)
            share = 100 * seen.published[1][-1].bytes / seen.full_bytes
            print(
                f"lr {learning_rate} step {step}: reward {reward:.2f}, {share:.3f} % of full, publish "
                f"{seen.publish_seconds[-1]:.3f} s, full write {seen.write_seconds[-1]:.3f} s",
                flush=True,
            )
        began = time.perf_counter()
        reader.fetch(steps, from_anchor=True)
        seen.join_seconds = time.perf_counter() - began
    return seen


def _time_one(seen: Measured, log: WeightLog, step: int, state: dict[str, Tensor], place: Path) -> None:
    """Publish and write in full. The order changes from step to step."""
    if step % 2:
        seen.write_seconds.append(time_full_write(state, place / "full.safetensors"))
    busy = time.process_time()
    seconds, result = time_publish(log, step, state)
    seen.processor_seconds.append(time.process_time() - busy)
    seen.publish_seconds.append(seconds)
    seen.published[1].append(result)
    if step % 2 == 0:
        seen.write_seconds.append(time_full_write(state, place / "full.safetensors"))


def sizes(learning_rate: str, seen: Measured) -> list[Figure]:
    """Return one row for each v: the size of patch and manifest against the full file."""
    rows = []
    for v, results in sorted(seen.published.items()):
        shares = [100 * result.bytes / seen.full_bytes for result in results]
        changed = statistics.median(result.changed for result in results) / (seen.full_bytes / 2)
        goal = GOALS.get((learning_rate, v))
        rows.append(
            Figure(
                f"weights-rollout.2.size-{learning_rate}.{v}",
                f"patch and manifest at lr {learning_rate}, v = {v}, of the full bf16 size: the largest",
                f"≤ {goal:g} %" if goal else "stated",
                round(max(shares), 3),
                "%",
                goal is None or max(shares) <= goal,
                len(shares),
                f"median {statistics.median(shares):.3f} %, least {min(shares):.3f} %, "
                f"{statistics.median(r.bytes for r in results) / 1e6:.2f} MB of {seen.full_bytes / 1e6:.0f} MB; "
                f"{100 * changed:.2f} % of the elements changed; {ABOUT}",
            )
        )
    return rows


def times(seen: Measured) -> list[Figure]:
    """Return the rows of times: a publish against a full write, and what a reader needs."""
    publish, write = statistics.median(seen.publish_seconds), statistics.median(seen.write_seconds)
    pairs = [p / w for p, w in zip(seen.publish_seconds, seen.write_seconds, strict=True)]
    phases = [result.seconds for result in seen.published[1]]
    parts = ", ".join(f"{name} {1000 * statistics.median(p[name] for p in phases):.0f}" for name in phases[0])
    load = os.getloadavg()[0]
    machine = f"2 cores, load average {load:.1f}"
    if load > LOADED:
        machine += ": other processes used the cores, which a publish needs and a file write hardly does"
    busy = 1000 * statistics.median(seen.processor_seconds)
    return [
        Figure(
            "weights-rollout.2.time",
            "publish at lr 1e-6, v = 1 (compare, encode, write, manifest) ÷ writing the full safetensors file",
            "≤ 0.5",
            round(publish / write, 2),
            "×",
            publish / write <= 0.5,
            len(pairs),
            f"medians {1000 * publish:.0f} and {1000 * write:.0f} ms, alternating, both with fsync; ratio of pairs "
            f"{min(pairs):.2f} to {max(pairs):.2f}; processor time of a publish {busy:.0f} ms over its threads; phases "
            f"in ms: {parts}; {machine}; both states are read, hashed and compared whole, however little has changed",
        ),
        Figure(
            "weights-rollout.2.anchor",
            "publish of an anchor ÷ writing the full safetensors file",
            "stated",
            round(statistics.median(seen.anchor_seconds) / write, 2),
            "×",
            True,
            len(seen.anchor_seconds),
            "the first version of a publisher: the host copy is made, every tensor and the file are hashed",
        ),
        Figure(
            "weights-rollout.2.fetch",
            "fetch of the next version by a reader that holds the one before: read, verify, apply, verify",
            "stated",
            round(1000 * statistics.median(seen.fetch_seconds)),
            "ms",
            True,
            len(seen.fetch_seconds),
            f"a late joiner that reads an anchor and {len(seen.fetch_seconds)} patches takes "
            f"{1000 * seen.join_seconds:.0f} ms; local disk, file cache warm; {machine}",
        ),
    ]


if __name__ == "__main__":
    parser = command_parser(__doc__, short="2 steps; record nothing")
    parser.add_argument("what", choices=["size", "time"])
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    figures: list[Figure] = []
    if chosen.what == "time":
        figures += times(measure("1e-6", 2 if chosen.short else 12, periods=(1,)))
    else:
        for rate in ("1e-6", "1e-5"):
            figures += sizes(rate, measure(rate, 2 if chosen.short else 20, periods=PERIODS))
    sys.exit(not (report(chosen.short, *figures) or chosen.short))
