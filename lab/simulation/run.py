"""Simulate runs that crash, stall and lose messages, thousands of them, in virtual time.

    python -m lab.simulation.run                      10,000 seeded schedules, 15 minutes; writes row run.2
    python -m lab.simulation.run --schedules 100      fewer schedules; the row then falls short
    python -m lab.simulation.run --refusals           2,000 schedules in which half of the batches are refused, 2 to 4
                                                      updates each; 5 minutes; writes row promises.8
    python -m lab.simulation.run --seed 17            one schedule; prints its journal, records nothing

The loop, desk, fleet and workers are the real ones; engines, trainer and logs are scripted (`world.py`). Every schedule
checks every invariant.
"""

import asyncio
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace

from lab.figures import Figure, command_parser, record
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind
from tests.fixtures.simulation import virtual_time
from tests.fixtures.simulation.world import Broken, World, append_foreign_groups, build


async def drive(world: World) -> None:
    """Run until the last step, and restart the driver whenever it dies."""
    guests = asyncio.create_task(append_foreign_groups(world))
    while True:
        loop = build(world)
        running = asyncio.create_task(loop.run())
        dies = world.rng.random() < world.faults.driver_dies * 10
        await asyncio.wait([running], timeout=world.rng.uniform(1, 60) if dies else 100_000)
        if running.done():
            running.result()
            break
        if not dies:
            raise Broken(f"no progress: still at step {loop.learner.step} after 100,000 s")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        world.journal.events.append({"step": world.saved_step, "kind": "driver died"})
    guests.cancel()
    await asyncio.gather(guests, return_exceptions=True)


def _left_by_lost_runs(events: Sequence[LedgerEvent]) -> set[str]:
    """Return the groups that were started before the driver last died: the resumed run may need other ones."""
    last = max(place for place, event in enumerate(events) if event.event is LedgerEventKind.REWOUND)
    return {event.group_id for event in events[:last] if event.event is LedgerEventKind.STARTED}


def _check_evaluations(world: World, crashes: int) -> None:
    """Every evaluation is of a published version with all prompts; without crashes each version is evaluated once."""
    found = [int(str(event["version"])) for event in world.journal.of("evaluated")]
    published = {event["version"] for event in world.journal.of("published")}
    if set(found) - published or any(event["prompts"] != 4 for event in world.journal.of("evaluated")):
        raise Broken(f"evaluated versions {found}, published {sorted(map(str, published))}")
    if not crashes and found != sorted(set(found)):
        raise Broken(f"evaluated versions {found}: each counts once, in order")
    every = world.evaluate_every
    if every and (0 not in found or (world.steps % every == 0 and found[-1] != world.steps)):
        raise Broken(f"evaluated versions {found}: the first or the last one is missing")


def check_schedule(seed: int, refusing: bool = False) -> tuple[str, Counter[str]]:
    """Run one schedule and check its invariants. Return a hash of its trace and what happened in it."""
    return check_world(World(seed, refusing))


def check_world(world: World) -> tuple[str, Counter[str]]:
    """See `check_schedule`."""
    virtual_time.run(drive(world))
    ledger = world.log.ledger()
    ledger.check()
    expired = {name for name, entry in ledger.fates.items() if entry.fate is Fate.EXPIRED and name.startswith("r-")}
    if expired - _left_by_lost_runs(world.log._events):
        raise Broken("a group of the run expired: it was admitted although it could not be trained in time")
    if ledger.counts[Fate.IN_FLIGHT]:
        raise Broken(f"{ledger.counts[Fate.IN_FLIGHT]} groups are in flight after the end")
    crashes = len(world.journal.of("driver died"))
    if not crashes and not world.replay and any(times > 1 for times in world.trained.values()):
        raise Broken("a group was trained twice")
    if not world.replay and any(len(entry.steps) > 1 for entry in ledger.fates.values()):
        raise Broken("a group counts as trained twice")
    steps = Counter(step for entry in ledger.fates.values() for step in entry.steps)
    _check_evaluations(world, crashes)
    recorded = {one: sum(map(int, entry.updates)) for one, entry in ledger.fates.items() if entry.updates}  # type: ignore[arg-type]
    if recorded != dict(world.updates_of):
        raise Broken(f"updates by group: recorded {recorded}, made {dict(world.updates_of)}")
    if set(steps) != set(range(1, world.steps + 1)) or max(steps.values()) > world.batch:
        raise Broken(f"groups by step: {dict(steps)}; a step trains one batch of at most {world.batch}")
    if any(len(set(entry.steps)) < len(entry.steps) for entry in ledger.fates.values()):
        raise Broken("a group was trained twice in one step")
    trained_steps = [event["step"] for event in world.journal.of("step")]
    if not crashes and trained_steps != list(range(1, world.steps + 1)):
        raise Broken(f"steps in the journal: {trained_steps}; each counts once")
    faults = replace(world.faults, slow=0.0, refusal=0.0, nothing_to_teach=0.0)
    cancelled = any("cancelled" in str(event) for event in world.journal.of("worker recovered"))
    if not any(astuple(faults)) and not cancelled and max(world.generated.values()) > 1:
        raise Broken("a slow group was generated twice, although nothing failed")
    trace = json.dumps([world.journal.events, [str(event) for event in world.log._events]])
    happened = Counter({kind: len(world.journal.of(kind)) for kind in ("worker lost", "driver died", "refused")})
    happened["refused after an update"] = world.refused_later
    happened["no gradient"] = len(world.journal.of("no gradient"))
    happened["trained"] = ledger.counts[Fate.TRAINED]
    happened["concurrent"] = world.concurrent
    happened["evaluations"] = len(world.journal.of("evaluated"))
    return hashlib.sha256(trace.encode()).hexdigest(), happened


def simulate(schedules: int, twice: int, processes: int = 1, refusing: bool = False) -> tuple[Counter[str], list[str]]:
    """Check every schedule, and run the first `twice` of them again to compare traces."""
    total: Counter[str] = Counter()
    failures = []
    jobs = [(seed, seed < twice, refusing) for seed in range(schedules)]
    with multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else nullcontext() as pool:
        for happened, failure in pool.imap_unordered(_one, jobs, 50) if pool else map(_one, jobs):
            total += happened
            if failure:
                failures.append(failure)
                print("FAILED", failure, flush=True)
    return total, failures


def _one(job: tuple[int, bool, bool]) -> tuple[Counter[str], str]:
    seed, again, refusing = job
    try:
        trace, happened = check_schedule(seed, refusing)
        if again and check_schedule(seed, refusing)[0] != trace:
            raise Broken("the same seed gives another trace")
    except Exception as error:  # every failure is reported with its seed
        return Counter(), f"{seed}: {error!r:.200}"
    return happened, ""


def main(schedules: int = 10_000, twice: int = 500) -> bool:
    """Row run.2."""
    began = time.monotonic()
    total, failures = simulate(schedules, twice, len(os.sched_getaffinity(0)))
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(total.items()))
    return record(
        Figure(
            "run.2",
            "schedules with crashes, slow workers, lost messages, late scores: lag bound, conservation, progress hold",
            "≥ 10,000, all hold",
            f"{schedules - len(failures):,} of {schedules:,}",
            "schedules",
            schedules >= 10_000 and not failures,
            schedules,
            f"{counts}; {min(twice, schedules):,} twice, the same trace byte for byte; {time.monotonic() - began:.0f} s"
            + ("" if schedules >= 10_000 else "; the others have not been run yet"),
        )
    )


def refusals(schedules: int = 2000) -> bool:
    """Row promises.8."""
    total, failures = simulate(schedules, 100, len(os.sched_getaffinity(0)), refusing=True)
    return record(
        Figure(
            "promises.8",
            "schedules with 2 to 4 updates per batch and refused batches: the ledger balances, no group is trained "
            "twice, k counts once",
            f"all of {schedules:,}",
            f"{schedules - len(failures):,} of {schedules:,}",
            "schedules",
            not failures and total["refused after an update"] > 0,
            schedules,
            f"{total['refused']:,} refusals, {total['refused after an update']:,} of them after an update; "
            f"{total['trained']:,} groups trained, {total['driver died']:,} driver crashes; 100 schedules twice, "
            "with the same trace",
        )
    )


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many schedules to run")
    parser.add_argument("--seed", type=int, help="run this schedule only and print its journal")
    parser.add_argument(
        "--refusals", action="store_true", help="schedules in which batches are refused, 2 to 4 updates"
    )
    options = parser.parse_args()
    if options.refusals:
        sys.exit(not refusals())
    if options.seed is None:
        sys.exit(not main(options.schedules))
    world = World(options.seed)
    try:
        check_world(world)
    finally:
        print("\n".join(map(str, world.journal.events)))
