"""The experience log under SIGKILL, failing storage and many writers.

    python -m lab.torture.experience --cycles 1000    # kills at random instants, faults at every step of a commit
    python -m lab.torture.experience --cycles 10      # the short form; nothing is recorded
    python -m lab.torture.experience writers          # four processes append 20,000 groups

The parent never touches Lance before it has forked its last child, so every child is a fresh process that costs
milliseconds to start.
"""

import argparse
import array
import fcntl
import os
import random
import sys
import tempfile
import termios
import time
import warnings
from collections import Counter
from datetime import timedelta

import numpy as np

from lab.figures import Figure, record
from lab.fixtures.groups import made
from lab.fixtures.processes import Say, Work, child, end, heard, outcome
from lab.torture.commit_faults import every_fault
from offbeat.experience.log import ExperienceLog
from offbeat.experience.maintenance import Maintenance
from offbeat.types import Group

BATCH = 128
LINE = len(f"acknowledged {0:>12}\n")
CYCLES_PER_LOG = 100
"""Then a new log: a reader that lives for half a second must have time to look at all of it."""


def small(number: int) -> Group:
    return made(number, size=2, tokens=4)


def writer(place: str, start: int) -> Work:
    """Append groups from `start` on, and say up to which number they are acknowledged. Compacts meanwhile."""

    def work(say: Say) -> None:
        with (
            ExperienceLog.open(place) as log,
            Maintenance(log.tables, every=0.05, keep=timedelta(seconds=2)),
        ):
            done = start
            while True:
                log.append([small(i) for i in range(done, done + BATCH)])
                done += BATCH
                say(f"acknowledged {done:>12}")

    return work


def reader(place: str, acknowledged: int, seed: int) -> Work:
    """Look again and again: nothing missing, nothing twice, nothing torn."""

    def work(say: Say) -> None:
        rng = np.random.default_rng(seed)
        with ExperienceLog.open(place) as log:
            while True:
                rows, now = log.index_since(None)
                count = len(rows)
                if count < acknowledged:
                    say(f"LOST {acknowledged} were acknowledged, {count} are there")
                chosen = rng.integers(0, count, 8).tolist() if count else []
                if log.read(chosen, now) != [small(i) for i in chosen]:
                    say(f"TORN among {chosen}")

    return work


def kill_cycles(place: str, cycles: int, seed: int) -> tuple[int, list[str]]:
    """Returns how many groups were acknowledged and what went wrong."""
    rng = random.Random(seed)
    acknowledged = 0
    complaints: list[str] = []
    for cycle in range(cycles):
        pids = [child(writer(place, acknowledged)), child(reader(place, acknowledged, cycle))]
        _let_them_work(pids[0][1], rng)
        rng.shuffle(pids)
        for pid, _ in pids:
            end(pid)
            time.sleep(rng.uniform(0.0, 0.01))
        for pid, hear in pids:
            os.waitpid(pid, 0)
            for line in heard(hear):
                if line.startswith("acknowledged "):
                    acknowledged = max(acknowledged, int(line.split()[1]))
                else:
                    complaints.append(f"cycle {cycle}: {line}")
    return acknowledged, complaints


def _let_them_work(hear: int, rng: random.Random) -> None:
    """Some commits and a moment more; sometimes only a moment, so that opening the log is struck too."""
    if rng.random() < 0.8:
        commits, deadline = rng.randint(1, 6), time.monotonic() + 20
        while _waiting(hear) < commits * LINE and time.monotonic() < deadline:
            time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.05))


def _waiting(hear: int) -> int:
    """Bytes said and not yet heard."""
    count = array.array("i", [0])
    fcntl.ioctl(hear, termios.FIONREAD, count)
    return count[0]


def audit(place: str, acknowledged: int) -> Work:
    """Read every group and compare it with what was appended."""

    def work(say: Say) -> None:
        with ExperienceLog.open(place) as log:
            now = log.snapshot()
            lost = torn = double = 0
            seen: set[str] = set()
            for number, group in enumerate(log.groups(now)):
                double += group.id in seen
                seen.add(group.id)
                torn += group != small(number)
            lost = sum(f"g{i}" not in seen for i in range(acknowledged))
            ledger = log.ledger(now)
            ledger.check()
            say(f"audit {lost} {torn} {double} {len(seen)} {now.groups - len(seen)} {len(log.damaged(now))}")

    return work


def killed_and_audited(cycles: int, seed: int) -> Counter[str]:
    """One log: kill its writer and reader that often, then read it all."""
    with tempfile.TemporaryDirectory(prefix="offbeat-torture-") as place:
        acknowledged, complaints = kill_cycles(place, cycles, seed)
        said = outcome(audit(place, acknowledged))
    if len(said) != 1 or not said[0].startswith("audit "):
        raise SystemExit(f"the audit failed: {said}")
    for complaint in complaints:
        print(complaint)
    lost, torn, double, seen, repeated, damaged = (int(part) for part in said[0].split()[1:])
    bad = lost + torn + double + damaged + len(complaints)
    return Counter(acknowledged=acknowledged, bad=bad, seen=seen, repeated=repeated)


def torture(cycles: int, seed: int, faults: bool) -> bool:
    began = time.time()
    total: Counter[str] = Counter()
    for start in range(0, cycles, CYCLES_PER_LOG):
        total += killed_and_audited(min(CYCLES_PER_LOG, cycles - start), seed + start)
        print(f"{min(start + CYCLES_PER_LOG, cycles)} cycles: {dict(total)}", flush=True)
    full = cycles >= 1000
    rows = [
        Figure(
            "experience.3.kill",
            "groups lost, torn or double after SIGKILL of writer and reader at random instants",
            "0 of ≥ 250,000 acknowledged",
            total["bad"],
            "groups",
            total["bad"] == 0 and (total["acknowledged"] >= 250_000 or not full),
            total["acknowledged"],
            f"{cycles} cycles in {(time.time() - began) / 60:.0f} min, a new log every {CYCLES_PER_LOG}, compaction "
            f"and clean-up running; {total['seen']:,} groups at the end, {total['repeated']} rows repeated after a "
            f"kill and left out by readers",
        )
    ]
    if faults:
        rows += every_fault()
    return record(*rows) if full else shown(*rows)


def shown(*rows: Figure) -> bool:
    """Print what a short form found; it is not recorded."""
    for row in rows:
        print(
            f"{row.id}  {row.what}: {row.measured} {row.unit} (goal {row.goal}), n = {row.n}, short form, not recorded"
        )
        print(f"  {row.note}")
    return all(row.holds for row in rows)


def one_of_four(place: str, first: int, last: int) -> Work:
    """Append numbers [first, last), a few at a time, and then some that its neighbour appends too."""

    def work(say: Say) -> None:
        with ExperienceLog.open(place) as log:
            for start in range(first, last, 25):
                log.append([small(i) for i in range(start, min(start + 25, last))])
            log.append([small(i) for i in range(max(0, first - 10), first)])

    return work


def writers(groups: int) -> bool:
    each = groups // 4
    with tempfile.TemporaryDirectory(prefix="offbeat-torture-") as place:
        began = time.time()
        children = [child(one_of_four(place, i * each, (i + 1) * each)) for i in range(4)]
        said = [line for _, hear in children for line in heard(hear)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
        seconds = time.time() - began
        with ExperienceLog.open(place) as log:
            now = log.snapshot()
            found = list(log.groups(now))
            ledger = log.ledger(now)
            ledger.check()
    by_id = {group.id: group for group in found}
    missing = sum(by_id.get(f"g{i}") != small(i) for i in range(groups))
    double = len(found) - len(by_id)
    unbalanced = abs(ledger.generated - groups) + abs(ledger.counts["waiting"] - groups)  # type: ignore[index]
    bad = missing + double + unbalanced + len(said) + sum(map(abs, codes))
    figure = Figure(
        "experience.4",
        "groups missing, double or unaccounted for after four concurrent writers",
        f"0 of {groups:,}",
        bad,
        "groups",
        bad == 0,
        groups,
        f"{groups / seconds:.0f} groups/s in commits of 25; {ledger.repeated} rows repeated on purpose and left out; "
        f"{ledger}" + (f"; first complaint: {said[0]}" if said else ""),
    )
    return record(figure) if groups >= 20_000 else shown(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["kill", "writers"], default="kill")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--groups", type=int, default=20_000, help="for writers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-faults", action="store_true", help="leave out the strace injections")
    chosen = parser.parse_args()
    # Lance warns about forking in general; here no Lance thread exists before the fork.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    if chosen.what == "writers":
        sys.exit(0 if writers(chosen.groups) else 1)
    sys.exit(0 if torture(chosen.cycles, chosen.seed, not chosen.no_faults) else 1)
