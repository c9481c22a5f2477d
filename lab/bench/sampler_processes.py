"""The processes that `python -m lab.bench.sampler` starts, times and kills, and the logs they work on."""

import gc
import json
import os
import time
import tracemalloc
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.figures import command_parser
from offbeat.experience.background import tidy
from offbeat.experience.feedback import LateScore
from offbeat.experience.index import Columns
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.rows import group_rows
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot, digest
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, VersionSpan
from tests.fixtures.memory import resident_bytes

G = 8
MODES: dict[str, Mode] = {"fresh": Fresh(), "replay": Replay(share=0.5, cooldown=2), "offline": Offline(cooldown=1)}


def a_group(number: int, length: int, version: int | None, rng: np.random.Generator, *, scored: bool = True) -> Group:
    """Return a group of G completions of `length` tokens. Without a version it comes from another system."""
    tokens = rng.integers(0, 49_152, (G, length), dtype=np.int32)
    logprobs = -rng.random((G, length), dtype=np.float32)
    rewards = rng.integers(0, 2, G)
    spans = () if version is None else (VersionSpan(version, 0, length),)
    completions = tuple(
        Completion(
            f"g{number}/{i}",
            tokens[i],
            UNKNOWN if version is None else logprobs[i],
            spans,
            source="other" if version is None else "policy",
            score=Score(float(rewards[i])) if scored else None,
        )
        for i in range(G)
    )
    prompt = Prompt(f"p{number}", rng.integers(0, 49_152, 64, dtype=np.int32), "arithmetic")
    return Group(f"g{number}", prompt, completions)


def build(place: Path, count: int, batch: int) -> None:
    """Build a log of `count` groups of 8 × 256 tokens, the first half without a version, compacted as in a run.

    Rows are written in large batches and without validation, which is measured elsewhere.
    """
    rng = np.random.default_rng(0)
    with ExperienceLog.open(place) as log:
        for first in range(0, count, 1000):
            groups = [
                a_group(n, 256, None if n < count // 2 else n // batch, rng)
                for n in range(first, min(first + 1000, count))
            ]
            rows = group_rows(groups, [digest(group) for group in groups], appended_at=time.time(), writer="bench")
            log.tables.groups.append(rows)
        while tidy(log.tables.groups):
            pass


def schedule(place: Path, steps: int) -> None:
    """Build a log that grows step by step, with some late feedback, and save the snapshot of each step."""
    rng = np.random.default_rng(1)
    snapshots = []
    number = 0
    with ExperienceLog.open(place) as log:
        unscored: list[Group] = []
        for k in range(steps):
            versions = [None if rng.random() < 0.2 else max(0, k - int(rng.integers(0, 6))) for _ in range(20)]
            groups = [a_group(number + i, 4, v, rng, scored=rng.random() < 0.8) for i, v in enumerate(versions)]
            number += len(groups)
            log.append(groups)
            unscored += [group for group in groups if not group.scored]
            rng.shuffle(unscored)
            ripened, unscored = unscored[:3], unscored[3:]
            log.score(LateScore(g.id, c.id, Score(float(i % 2))) for g in ripened for i, c in enumerate(g.completions))
            snapshots.append(log.snapshot().to_json())
        tidy(log.tables.groups)
        tidy(log.tables.scores)
    (place / "schedule.json").write_text(json.dumps(snapshots))


def draw_and_read(place: Path, name: str, batch: int, draws: int) -> None:
    """In a process of its own: print the milliseconds of drawing and reading a batch, all threads included."""
    with ExperienceLog.open(place) as log:
        rows, now = log.index_since(None)
        sampler = Sampler(MODES[name], SamplerLimits(batch), seed=0)
        sampler.feed(rows)
        gc.collect()
        gc.freeze()  # as a trainer should: otherwise full collections walk all imported objects, 15 to 20 ms each
        took: list[tuple[float, float, float]] = []
        for k in range(len(rows) // batch, len(rows) // batch + draws):
            start, cpu = time.perf_counter(), time.process_time()
            draw = sampler.draw(k)
            drawn = time.perf_counter()
            assert isinstance(draw, Draw)
            groups = log.read(draw.ordinals, now)
            took.append((drawn - start, time.perf_counter() - start, time.process_time() - cpu))
            assert len(groups) == batch and all(len(group.completions) == G for group in groups)
    drawing, both, cpu_of_both = 1e3 * np.array(took).T
    on_processor = {f"processor {name}": value for name, value in _spread(cpu_of_both).items()}
    print(json.dumps({"draw": np.percentile(drawing, 99), **_spread(both), **on_processor}))


def _spread(milliseconds: NDArray[np.float64]) -> dict[str, float]:
    return {"p50": float(np.median(milliseconds)), "p99": float(np.percentile(milliseconds, 99))}


def index_memory(place: Path, name: str, batch: int) -> None:
    """In a process of its own, without Lance's caches: print the bytes per group of a sampler, counted two ways."""
    columns = Columns(**dict(np.load(place / "columns.npz")))

    def used_sampler() -> Sampler:
        sampler = Sampler(MODES[name], SamplerLimits(batch), seed=0)
        for first in range(0, len(columns), 500):  # it grows in steps, as in a run
            part = slice(first, first + 500)
            sampler.feed(Columns(**{f.name: getattr(columns, f.name)[part] for f in fields(Columns)}))
        for k in range(len(columns) // batch, len(columns) // batch + 20):
            assert isinstance(sampler.draw(k), Draw)
        return sampler

    before = resident_bytes()
    sampler = used_sampler()
    grown = resident_bytes() - before
    del sampler
    tracemalloc.start()
    sampler = used_sampler()
    held, peak = tracemalloc.get_traced_memory()
    assert sampler.nbytes <= held
    print(json.dumps({"held": held / len(columns), "peak": peak / len(columns), "resident": grown / len(columns)}))


def write_and_draw(place: Path, batch: int) -> None:
    """In a process of its own, until it is killed: append, draw, read and write checkpoints."""
    rng = np.random.default_rng(os.getpid())
    with ExperienceLog.open(place) as log:
        rows, now = log.index_since(None)
        sampler = Sampler(Offline(), SamplerLimits(batch), seed=0)
        sampler.feed(rows)
        for k in range(10**6):
            draw = sampler.draw(k)
            assert isinstance(draw, Draw)
            log.read(draw.ordinals, now)
            save(place / "checkpoint.json", now, sampler)
            log.append([a_group(10**9 + os.getpid() * 1000 + k, 256, k, rng)])
            print(k, flush=True)


def reopen(place: Path, batch: int) -> None:
    """In a process of its own: draw and read the first batch after a restart."""
    with ExperienceLog.open(place) as log:
        sampler = Sampler(Offline(), SamplerLimits(batch), seed=0)
        now, k = load(place / "checkpoint.json", log, sampler)
        draw = sampler.draw(k + 1)
        assert isinstance(draw, Draw) and len(log.read(draw.ordinals, now)) == batch
    print("{}")


def save(path: Path, snapshot: Snapshot, sampler: Sampler) -> None:
    """Save a checkpoint that a kill cannot tear."""
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        json.dump({"snapshot": snapshot.to_json(), "sampler": sampler.state()}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load(path: Path, log: ExperienceLog, sampler: Sampler) -> tuple[Snapshot, int]:
    """Feed and restore the sampler from a checkpoint. Return its snapshot and k."""
    state = json.loads(path.read_text())
    rows, now = log.index_since(None, Snapshot.from_json(state["snapshot"]))
    sampler.feed(rows)
    sampler.restore(state["sampler"])
    return now, int(state["sampler"]["k"])


def consume(place: Path, name: str, run: str) -> None:
    """In a process of its own: draw step by step, record each outcome, save a checkpoint every third step."""
    visible = [Snapshot.from_json(entry) for entry in json.loads((place / "schedule.json").read_text())]
    checkpoint = place / f"{run}.json"
    with ExperienceLog.open(place) as log, (place / f"{run}.drawn").open("a") as drawn:
        sampler = Sampler(MODES[name], SamplerLimits(16, max_lag=4), seed=5)
        fed, first = Snapshot(), 0
        if checkpoint.exists():
            fed, first = load(checkpoint, log, sampler)
            first += 1
        for k in range(first, len(visible)):
            rows, fed = log.index_since(fed, visible[k])
            sampler.feed(rows)
            outcome = sampler.draw(k)
            print(json.dumps([k, repr(outcome)]), file=drawn, flush=True)
            if k % 3 == 0 and isinstance(outcome, Draw):
                save(checkpoint, fed, sampler)
            print(k, flush=True)


def main(what: str, place: Path, *rest: str) -> None:
    """Do the work of one process, by its name."""
    match what, rest:
        case "draw-and-read", (mode, batch, draws):
            draw_and_read(place, mode, int(batch), int(draws))
        case "index-memory", (mode, batch):
            index_memory(place, mode, int(batch))
        case "write-and-draw", (batch,):
            write_and_draw(place, int(batch))
        case "reopen", (batch,):
            reopen(place, int(batch))
        case "consume", (mode, run):
            consume(place, mode, run)
        case _:
            raise SystemExit(f"{what} {' '.join(rest)}: no such process; run python -m lab.bench.sampler instead")


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("what", help="the name of the process")
    parser.add_argument("place", type=Path, help="the directory of the log")
    parser.add_argument("rest", nargs="*", help="the arguments of the process")
    arguments = parser.parse_args()
    main(arguments.what, arguments.place, *arguments.rest)
