"""Measure the experience log.

    python -m lab.bench.experience throughput    append against bare Lance: rows experience.1.submit and .append
    python -m lab.bench.experience growth        the cost of a late commit: row experience.1.growth
    python -m lab.bench.experience append        both of these
    python -m lab.bench.experience door          validation of broken groups: rows experience.5.door and .door-time

Minutes each; with `--short` seconds, and nothing is recorded. `throughput` validates and hashes on one core while Lance
writes on another, so it needs two free cores.
"""

import itertools
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

from lab.figures import Figure, command_parser, machine, record, show
from offbeat.experience.background import Maintenance
from offbeat.experience.log import ExperienceLog
from offbeat.experience.rows import group_rows
from offbeat.experience.schema import digest
from offbeat.experience.validation import RefusalReason, validate_group
from offbeat.storage.files import fsync_paths
from offbeat.types import Group
from tests.fixtures.groups import RULES, make_group, malformed

BATCH = 64
"""Groups in one append."""


def bare_lance(place: Path, tables: list[pa.Table]) -> float:
    """Return the seconds that Lance alone takes to append these rows with the same durability."""
    uri = str(place / "groups.lance")
    dataset = lance.write_dataset(tables[0].slice(0, 0), uri, enable_stable_row_ids=True)
    began = time.perf_counter()
    for table in tables:
        dataset = lance.write_dataset(table, dataset, mode="append")
        newest = [Path(uri) / "data" / file.path for file in dataset.get_fragments()[-1].data_files()]
        manifest = Path(uri) / "_versions" / f"{2**64 - 1 - dataset.version:020}.manifest"
        fsync_paths(*newest, newest[0].parent, manifest, manifest.parent)
    return time.perf_counter() - began


def submitting(place: Path, batches: list[list[Group]]) -> float:
    """Return the seconds until the log has acknowledged all batches if the caller does not wait in between."""
    with ExperienceLog.open(place, rules=RULES) as log:
        log.append([make_group(10**6)])
        began = time.perf_counter()
        for receipt in [log.submit(batch) for batch in batches]:
            receipt.result()
        return time.perf_counter() - began


def appending(place: Path, batches: list[list[Group]]) -> float:
    """Return the seconds if the caller waits for each acknowledgment."""
    with ExperienceLog.open(place, rules=RULES) as log:
        log.append([make_group(10**6)])
        began = time.perf_counter()
        for batch in batches:
            log.append(batch)
        return time.perf_counter() - began


def in_new_directory(run: Callable[[Path], float]) -> float:
    place = Path(tempfile.mkdtemp(prefix="offbeat-bench-"))
    try:
        return run(place)
    finally:
        shutil.rmtree(place)


def throughput(rounds: int, batches_per_round: int) -> tuple[Figure, Figure]:
    """Append the same groups with bare Lance, `submit` and `append`, in turn."""
    times: dict[str, list[float]] = {"bare": [], "submit": [], "append": []}
    for turn in range(rounds + 1):
        start = turn * batches_per_round * BATCH
        numbers = range(start, start + batches_per_round * BATCH)
        groups = [make_group(i, size=8, tokens=1024) for i in numbers]
        batches = [groups[i : i + BATCH] for i in range(0, len(groups), BATCH)]
        tables = [group_rows(b, [digest(g) for g in b], appended_at=time.time(), writer="bench") for b in batches]
        taken = {
            "bare": in_new_directory(lambda place, tables=tables: bare_lance(place, tables)),  # type: ignore[misc]
            "submit": in_new_directory(lambda place, batches=batches: submitting(place, batches)),  # type: ignore[misc]
            "append": in_new_directory(lambda place, batches=batches: appending(place, batches)),  # type: ignore[misc]
        }
        for name, seconds in taken.items():
            if turn:  # the first round warms up
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: batches_per_round * BATCH / seconds for name, seconds in median.items()}
    note = (
        f"medians of {rounds} alternating rounds of {batches_per_round} × {BATCH} groups of 8 × 1,024 tokens; "
        f"groups/s: {', '.join(f'{name} {value:.0f}' for name, value in rate.items())}. Bare Lance gets finished Arrow "
        f"tables and the same fsyncs; ours starts from Group objects, validates and hashes them, on a second core if "
        f"one is free; {machine()}"
    )
    submit, append = (round(rate[name] / rate["bare"], 2) for name in ("submit", "append"))
    waiting = "append through append() by one caller that waits for each batch ÷ bare Lance"
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
    """Compare the cost of a commit to a log with many commits and to one with few, in turn, while compaction runs."""
    with ExitStack() as stack:
        logs = [stack.enter_context(_maintained_log()) for _ in range(2)]
        numbers = itertools.count()

        def commit(log: ExperienceLog) -> float:
            group = [make_group(next(numbers), size=2, tokens=16)]
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


def measure_throughput(short: bool) -> bool:
    return _finish(list(throughput(2, 3) if short else throughput(21, 8)), short)


def measure_growth(short: bool) -> bool:
    return _finish([growth(300, 30, 20) if short else growth(10_000, 100, 100)], short)


def measure_append(short: bool) -> bool:
    both = [measure_throughput(short), measure_growth(short)]
    return all(both)


def measure_validation(short: bool) -> bool:
    """Append broken groups of every kind to a real log, in batches that also contain a good group."""
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
            receipt = log.append([*(case for case, _, _ in cases), make_group(good)])  # type: ignore[list-item]
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
    return _finish([measured, validation_time()], short)


def validation_time() -> Figure:
    groups = [make_group(i, size=8, tokens=1024) for i in range(200)]
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


def _finish(rows: list[Figure], short: bool) -> bool:
    """Record the rows of a full run. A short run is too small for the goals of growth and submit."""
    if not short:
        return record(*rows)
    show(*rows)
    return all(row.holds for row in rows if "growth" not in row.id and "submit" not in row.id)


COMMANDS = {
    "append": measure_append,
    "throughput": measure_throughput,
    "growth": measure_growth,
    "door": measure_validation,
}

if __name__ == "__main__":
    parser = command_parser(__doc__, short="run for seconds and record nothing")
    parser.add_argument("what", choices=COMMANDS)
    chosen = parser.parse_args()
    sys.exit(not COMMANDS[chosen.what](chosen.short))
