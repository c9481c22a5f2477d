"""Figures of the experience log: `append` (`throughput` and `growth`) and `door` (validation).

    python -m lab.bench.experience append            # some minutes
    python -m lab.bench.experience append --short    # seconds; nothing is recorded
    python -m lab.bench.experience door

`throughput` checks and digests on one core while Lance writes on another: it needs two that are free.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lab.figures import Figure, record
from lab.fixtures.groups import RULES, made, malformed
from offbeat.experience.lance_table import force_to_disk
from offbeat.experience.log import ExperienceLog
from offbeat.experience.maintenance import Maintenance
from offbeat.experience.quarantine import RefusalReason
from offbeat.experience.rows import group_rows
from offbeat.experience.schema import digest
from offbeat.experience.validation import validate_group
from offbeat.types import Group

BATCH = 64
"""Groups handed over at once."""


def bare_lance(place: Path, tables: list[pa.Table]) -> float:
    """Seconds that Lance alone takes to append these rows with the same durability."""
    uri = str(place / "groups.lance")
    dataset = lance.write_dataset(tables[0].slice(0, 0), uri, enable_stable_row_ids=True)
    began = time.perf_counter()
    for table in tables:
        dataset = lance.write_dataset(table, dataset, mode="append")
        newest = [Path(uri) / "data" / file.path for file in dataset.get_fragments()[-1].data_files()]
        manifest = Path(uri) / "_versions" / f"{2**64 - 1 - dataset.version:020}.manifest"
        force_to_disk([*newest, newest[0].parent, manifest, manifest.parent])
    return time.perf_counter() - began


def submitting(place: Path, batches: list[list[Group]]) -> float:
    """Seconds until the log has acknowledged all, when the caller does not wait in between."""
    with ExperienceLog.open(place, rules=RULES) as log:
        log.append([made(10**6)])
        began = time.perf_counter()
        for receipt in [log.submit(batch) for batch in batches]:
            receipt.result()
        return time.perf_counter() - began


def appending(place: Path, batches: list[list[Group]]) -> float:
    """Seconds when the caller waits for each acknowledgement."""
    with ExperienceLog.open(place, rules=RULES) as log:
        log.append([made(10**6)])
        began = time.perf_counter()
        for batch in batches:
            log.append(batch)
        return time.perf_counter() - began


def in_a_new_place(run: Callable[[Path], float]) -> float:
    place = Path(tempfile.mkdtemp(prefix="offbeat-bench-"))
    try:
        return run(place)
    finally:
        shutil.rmtree(place)


def throughput(rounds: int, batches_per_round: int) -> tuple[Figure, Figure]:
    """The same groups through bare Lance, `submit` and `append`, alternating."""
    times: dict[str, list[float]] = {"bare": [], "submit": [], "append": []}
    for turn in range(rounds + 1):
        start = turn * batches_per_round * BATCH
        numbers = range(start, start + batches_per_round * BATCH)
        groups = [made(i, size=8, tokens=1024) for i in numbers]
        batches = [groups[i : i + BATCH] for i in range(0, len(groups), BATCH)]
        tables = [group_rows(b, [digest(g) for g in b], appended_at=time.time(), writer="bench") for b in batches]
        taken = {
            "bare": in_a_new_place(lambda place, tables=tables: bare_lance(place, tables)),  # type: ignore[misc]
            "submit": in_a_new_place(lambda place, batches=batches: submitting(place, batches)),  # type: ignore[misc]
            "append": in_a_new_place(lambda place, batches=batches: appending(place, batches)),  # type: ignore[misc]
        }
        for name, seconds in taken.items():
            if turn:  # the first round warms up
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: batches_per_round * BATCH / seconds for name, seconds in median.items()}
    note = (
        f"medians of {rounds} alternating rounds of {batches_per_round} × {BATCH} groups of 8 × 1,024 tokens; "
        f"groups/s: {', '.join(f'{name} {value:.0f}' for name, value in rate.items())}. Bare Lance is given finished "
        f"Arrow tables and the same fsyncs; ours starts from Group objects, checks and digests them, "
        f"on a second core where one is free; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}"
    )
    submit, append = (round(rate[name] / rate["bare"], 2) for name in ("submit", "append"))
    waiting = "append through append() by one caller who waits for each batch ÷ bare Lance"
    return (
        Figure(
            "experience.1.submit",
            "append through submit() ÷ bare Lance",
            "≥ 0.9",
            submit,
            "×",
            submit >= 0.9,
            rounds,
            note,
        ),
        Figure("experience.1.append", waiting, "stated, no goal", append, "×", True, rounds, note),
    )


def growth(commits: int, early: int, pairs: int) -> Figure:
    """Cost of a commit to a log that has many behind it, against one that has few: alternating, compaction running."""
    with ExitStack() as stack:
        logs = [stack.enter_context(_maintained_log()) for _ in range(2)]
        numbers = itertools.count()

        def commit(log: ExperienceLog) -> float:
            group = [made(next(numbers), size=2, tokens=16)]
            began = time.perf_counter()
            log.append(group)
            return 1e3 * (time.perf_counter() - began)

        for log, count in zip(logs, (commits - pairs // 2, early - pairs // 2), strict=True):
            for _ in range(count):
                commit(log)
        late, soon = zip(*((commit(logs[0]), commit(logs[1])) for _ in range(pairs)), strict=True)
        fragments = len(logs[0].tables.groups.fragment_sizes())
        assert logs[0].size() == commits + pairs // 2
    ratio = statistics.median(late) / statistics.median(soon)
    return Figure(
        "experience.1.growth",
        f"cost of the {commits:,}th commit ÷ the {early:,}th, compaction running",
        "≤ 2",
        round(ratio, 2),
        "×",
        ratio <= 2,
        pairs,
        f"medians of {pairs} pairs, alternating between a log of {commits:,} commits and one of {early:,}: "
        f"{statistics.median(late):.1f} ms and {statistics.median(soon):.1f} ms; the longest {max(late):.0f} ms and "
        f"{max(soon):.0f} ms; the long log has {fragments} fragments",
    )


@contextmanager
def _maintained_log() -> Iterator[ExperienceLog]:
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as place,
        ExperienceLog.open(place) as log,
        Maintenance(log.tables, keep=timedelta(minutes=1)),
    ):
        yield log


def bench_throughput(short: bool) -> bool:
    return _show(list(throughput(2, 3) if short else throughput(21, 8)), short)


def bench_growth(short: bool) -> bool:
    return _show([growth(300, 30, 20) if short else growth(10_000, 100, 100)], short)


def bench_append(short: bool) -> bool:
    fine = [bench_throughput(short), bench_growth(short)]
    return all(fine)


def bench_door(short: bool) -> bool:
    """Broken groups of every kind through a real log, in batches that also hold a good group."""
    wanted = 500 if short else 10_000
    per_batch = 25
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as place, ExperienceLog.open(place, rules=RULES) as log:
        good = 0

        @given(st.lists(malformed(), min_size=per_batch, max_size=per_batch))
        @settings(
            max_examples=wanted // per_batch,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        def batch(cases: list[tuple[object, RefusalReason, str]]) -> None:
            nonlocal good
            receipt = log.append([*(case for case, _, _ in cases), made(good)])  # type: ignore[list-item]
            good += 1
            for (_, reason, what), entry in zip(cases, receipt.refused, strict=True):
                kinds[what] += 1
                if entry.refusal.reason != reason:
                    wrong.append(f"{what}: {entry.refusal}")

        batch()
        kept = Counter(entry.refusal.reason for entry in log.quarantined())
        stored = log.size()
    seen = sum(kinds.values())
    holds = not wrong and sum(kept.values()) == seen and stored == good and seen >= wanted
    measured = Figure(
        "experience.5.door",
        "malformed groups quarantined for the wrong reason, or not at all",
        f"0 of ≥ {wanted:,}",
        len(wrong) + abs(seen - sum(kept.values())),
        "groups",
        holds,
        seen,
        f"{len(kinds)} kinds of breakage, {len(kept)} reasons; the {good} good groups among them are all in the log"
        + (f"; first wrong: {wrong[0]}" if wrong else ""),
    )
    return _show([measured, door_time()], short)


def door_time() -> Figure:
    groups = [made(i, size=8, tokens=1024) for i in range(200)]
    times: list[float] = []
    for group in groups:
        began = time.perf_counter()
        refusal = validate_group(group, RULES)
        times.append(1e3 * (time.perf_counter() - began))
        assert refusal is None
    median = statistics.median(times)
    return Figure(
        "experience.5.door-time",
        "validation of a group of 8 × 1,024 tokens",
        "≤ 2",
        round(median, 3),
        "ms",
        median <= 2,
        len(times),
        f"median; 99th percentile {statistics.quantiles(times, n=100)[98]:.3f} ms",
    )


def _show(rows: list[Figure], short: bool) -> bool:
    if not short:
        return record(*rows)
    for row in rows:
        print(
            f"{row.id}  {row.what}: {row.measured} {row.unit} (goal {row.goal}), short form, not recorded\n  {row.note}"
        )
    return all(row.holds for row in rows if "growth" not in row.id and "submit" not in row.id)


BENCHES = {"append": bench_append, "throughput": bench_throughput, "growth": bench_growth, "door": bench_door}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes; records nothing")
    chosen = parser.parse_args()
    sys.exit(0 if BENCHES[chosen.what](chosen.short) else 1)
