"""Measure what the driver does at every step, with logs of 10,000 and of 1,000,000 groups, and how fast it resumes.

    python -m lab.bench.growth     polling new groups, drawing in each mode, counting what waits, by turns; opening the
                                   long log and restoring a sampler: rows throughput.6.poll, .draw.*, .waiting.*,
                                   .resume; 10 minutes, 2 GB of disk

`--short` uses small logs and records nothing.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa

from lab.bench.sampler_processes import a_group
from lab.figures import Figure, command_parser, machine, report
from offbeat.experience.background import tidy
from offbeat.experience.index_files import IndexFiles
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.rows import group_rows
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot, digest

BATCH: Final = 64
BLOCK: Final = 10_000
SEED: Final = 1
MODES: Final[dict[str, Mode]] = {
    "fresh": Fresh(),
    "replay": Replay(share=0.5, cooldown=2),
    "offline": Offline(cooldown=1),
}


def build(place: Path, count: int) -> None:
    """Build a log of `count` groups of 8 × 4 tokens, one version for each batch, compacted as in a run."""
    rng, block = np.random.default_rng(0), min(count, BLOCK)
    groups = [a_group(number, 4, 0, rng) for number in range(block)]
    rows = group_rows(groups, [digest(group) for group in groups], appended_at=time.time(), writer="bench")
    with ExperienceLog.open(place) as log:
        for first in range(0, count, block):
            numbers = np.arange(first, first + block)
            named = _with(rows, "group_id", [f"g{number}" for number in numbers])
            log.tables.groups.append(_with(named, "oldest_version", (numbers // BATCH).astype(np.int32)))
        while tidy(log.tables.groups):
            pass


def _with(rows: pa.Table, name: str, values: object) -> pa.Table:
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.schema.field(name), pa.array(values))


class Driver:
    """A log, and a sampler in each mode that has drawn from it until only the newest groups are new."""

    def __init__(self, place: Path) -> None:
        self.log = ExperienceLog.open(place)
        self.rng = np.random.default_rng(1)
        rows, self.cursor = self.log.index_since(None)
        self.number, self.k = len(rows), len(rows) // BATCH
        self.samplers = {name: Sampler(mode, SamplerLimits(BATCH), seed=SEED) for name, mode in MODES.items()}
        for name, sampler in self.samplers.items():
            sampler.feed(rows)
            if name != "offline":  # all but a tenth were drawn before, as in a run that has come this far
                for k in range(self.k * 9 // 10):
                    sampler.draw(k)

    def save_index(self, place: Path) -> None:
        """Write the index of the log as it is now, as a run does beside a checkpoint."""
        assert IndexFiles(place, self.log).save_if_grown(self.samplers["fresh"].columns, self.cursor)

    def checkpoint(self) -> dict[str, str]:
        """Return what a checkpoint keeps of log and sampler, by mode."""
        snapshot = self.cursor.to_json()
        return {name: json.dumps({"snapshot": snapshot, "sampler": one.state()}) for name, one in self.samplers.items()}

    def step(self) -> dict[str, float]:
        """Append a batch; return the milliseconds of reading it, and of drawing and counting in each mode."""
        groups = [a_group(self.number + i, 4, self.k, self.rng) for i in range(BATCH)]
        self.log.append(groups)
        self.number, self.k = self.number + BATCH, self.k + 1
        took: dict[str, float] = {}
        with _timed(took, "poll"):
            rows, self.cursor = self.log.index_since(self.cursor)
        for name, sampler in self.samplers.items():
            sampler.feed(rows)
            with _timed(took, f"draw.{name}"):
                drawn = sampler.draw(self.k)
            assert isinstance(drawn, Draw)
            with _timed(took, f"waiting.{name}"):
                sampler.waiting_count(self.k)
        return took


@contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    start, cpu = time.perf_counter(), time.process_time()
    yield
    took[name], took[f"{name} cpu"] = (time.perf_counter() - start) * 1e3, (time.process_time() - cpu) * 1e3


def resume(place: Path, index: Path, checkpoint: str, mode: str) -> None:
    """Do what a run that resumes does to draw its next batch; see `run/build.py`."""
    saved = cast("dict[str, Any]", json.loads(checkpoint))
    with ExperienceLog.open(place) as log:
        sampler = Sampler(MODES[mode], SamplerLimits(BATCH), seed=SEED)
        sampler.restore(saved["sampler"], IndexFiles(index, log).load(Snapshot.from_json(saved["snapshot"])))
        assert isinstance(sampler.draw(saved["sampler"]["k"] + 1), Draw)


def resume_figure(place: Path, checkpoint: dict[str, str], indexes: dict[str, Path], rounds: int) -> Figure:
    """Return the row throughput.6.resume. The first of `indexes` counts, in the slowest mode; the note has the rest."""
    took: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for age, index in indexes.items():
            for mode in MODES:
                gc.collect()
                one: dict[str, float] = {}
                with _timed(one, "s"):
                    resume(place, index, checkpoint[mode], mode)
                took.setdefault(f"{mode}, {age}", []).append({name: value / 1e3 for name, value in one.items()})
    medians = {name: float(np.median([one["s"] for one in found])) for name, found in took.items()}
    cpu = {name: float(np.median([one["s cpu"] for one in found])) for name, found in took.items()}
    slowest = max((name for name in medians if name.endswith(next(iter(indexes)))), key=lambda name: medians[name])
    seconds = [one["s"] for one in took[slowest]]
    groups = json.loads(checkpoint["fresh"])["snapshot"]["groups"]
    return Figure(
        "throughput.6.resume", f"from opening a log of {groups:,} groups to a batch drawn by the restored sampler",
        "≤ 1 s", round(medians[slowest], 3), "s", medians[slowest] <= 1, rounds,
        f"median, range {min(seconds):.2f} to {max(seconds):.2f}; {slowest}; file cache warm; medians of all, with "
        f"processor time: {'; '.join(f'{name} {medians[name]:.2f} ({cpu[name]:.2f}) s' for name in took)}; {machine()}",
    )  # fmt: skip


def main() -> bool:
    short = command_parser(__doc__, short="small logs").parse_args().short
    sizes, rounds = ((1_000, 10_000), 20) if short else ((10_000, 1_000_000), 1_000)
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        places = [Path(name) / str(size) for size in sizes]
        for place, size in zip(places, sizes, strict=True):
            build(place, size)
        small, large = (Driver(place) for place in places)
        newest, earlier = Path(name) / "newest", Path(name) / "earlier"
        large.save_index(earlier)
        pairs = [(small.step(), large.step()) for _ in range(rounds)]
        while tidy(large.log.tables.groups):  # a run does so in the background
            pass
        large.save_index(newest)
        checkpoint = large.checkpoint()
        indexes = {"index of the checkpoint": newest, f"index {rounds * BATCH:,} groups behind it": earlier}
        for driver in (small, large):
            driver.log.close()
        del small, large, driver
        rows = [resume_figure(places[1], checkpoint, indexes, 3 if short else 10)]
    for what in [key for key in pairs[0][0] if not key.endswith("cpu")]:
        wall, cpu = (_compared(pairs, f"{what}{suffix}") for suffix in ("", " cpu"))
        rows.append(Figure(
            f"throughput.6.{what}", f"{_DESCRIPTIONS[what.partition('.')[0]]}: {sizes[1]:,} groups ÷ {sizes[0]:,}",
            "≤ 1.2", round(cpu[2], 2), "×", cpu[2] <= 1.2, rounds,
            f"processor time, medians {cpu[0]:.3f} and {cpu[1]:.3f} ms; wall clock {wall[2]:.2f} × "
            f"({wall[0]:.3f} and {wall[1]:.3f} ms), by turns; {machine()}",
        ))  # fmt: skip
    return report(short, *rows)


_DESCRIPTIONS: Final = {
    "poll": "reading a batch of new groups",
    "draw": "drawing a batch",
    "waiting": "counting what waits",
}


def _compared(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> tuple[float, float, float]:
    small, large = (float(np.median([pair[i][name] for pair in pairs])) for i in (0, 1))
    return small, large, large / small


if __name__ == "__main__":
    sys.exit(not main())
