"""Test the experience log under SIGKILL, failing storage and many writers.

    python -m lab.torture.experience --cycles 1000    kills at random moments, faults at every step of a commit: rows
                                                      experience.3.*; about half an hour
    python -m lab.torture.experience --cycles 10      a short run; nothing is recorded
    python -m lab.torture.experience writers          four processes append 20,000 groups: row experience.4; minutes

The parent does not use Lance before it has forked its last child, so every child is a fresh process that starts in
milliseconds.
"""

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

from lab.figures import Figure, command_parser, report
from lab.torture.commit_faults import every_fault
from offbeat.experience.background import Maintenance
from offbeat.experience.log import ExperienceLog
from offbeat.types import Group
from tests.fixtures.groups import make_group
from tests.fixtures.processes import Send, Work, fork, kill, read_lines, run_to_end

BATCH = 128
LINE = len(f"acknowledged {0:>12}\n")
CYCLES_PER_LOG = 100
"""Then a new log, because a reader that lives for half a second must have time to read all of it."""


def small(number: int) -> Group:
    return make_group(number, size=2, tokens=4)


def writer(place: str, start: int) -> Work:
    """Append groups from `start` on and send the number of acknowledged groups. Compaction runs meanwhile."""

    def work(send: Send) -> None:
        with (
            ExperienceLog.open(place) as log,
            Maintenance(log.tables, every=0.05, keep=timedelta(seconds=2)),
        ):
            done = start
            while True:
                log.append([small(i) for i in range(done, done + BATCH)])
                done += BATCH
                send(f"acknowledged {done:>12}")

    return work


def reader(place: str, acknowledged: int, seed: int) -> Work:
    """Read again and again: no group may be missing or torn."""

    def work(send: Send) -> None:
        rng = np.random.default_rng(seed)
        with ExperienceLog.open(place) as log:
            while True:
                rows, now = log.index_since(None)
                count = len(rows)
                if count < acknowledged:
                    send(f"LOST {acknowledged} were acknowledged, the log has {count}")
                chosen = rng.integers(0, count, 8).tolist() if count else []
                if log.read(chosen, now) != [small(i) for i in chosen]:
                    send(f"TORN among {chosen}")

    return work


def kill_cycles(place: str, cycles: int, seed: int) -> tuple[int, list[str]]:
    """Start and kill a writer and a reader. Return how many groups were acknowledged, and the problems."""
    rng = random.Random(seed)
    acknowledged = 0
    problems: list[str] = []
    for cycle in range(cycles):
        pids = [fork(writer(place, acknowledged)), fork(reader(place, acknowledged, cycle))]
        _let_them_work(pids[0][1], rng)
        rng.shuffle(pids)
        for pid, _ in pids:
            kill(pid)
            time.sleep(rng.uniform(0.0, 0.01))
        for pid, pipe in pids:
            os.waitpid(pid, 0)
            for line in read_lines(pipe):
                if line.startswith("acknowledged "):
                    acknowledged = max(acknowledged, int(line.split()[1]))
                else:
                    problems.append(f"cycle {cycle}: {line}")
    return acknowledged, problems


def _let_them_work(pipe: int, rng: random.Random) -> None:
    """Wait for some commits and a moment more, or only for a moment, so that kills also hit the opening of the log."""
    if rng.random() < 0.8:
        commits, deadline = rng.randint(1, 6), time.monotonic() + 20
        while _unread_bytes(pipe) < commits * LINE and time.monotonic() < deadline:
            time.sleep(0.001)
    time.sleep(rng.uniform(0.0, 0.05))


def _unread_bytes(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def audit(place: str, acknowledged: int) -> Work:
    """Read every group and compare it with what was appended."""

    def work(send: Send) -> None:
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
            send(f"audit {lost} {torn} {double} {len(seen)} {now.groups - len(seen)} {len(log.damaged(now))}")

    return work


def killed_and_audited(cycles: int, seed: int) -> Counter[str]:
    """Kill the writer and the reader of one log `cycles` times, then read all of it."""
    with tempfile.TemporaryDirectory(prefix="offbeat-torture-") as place:
        acknowledged, problems = kill_cycles(place, cycles, seed)
        sent = run_to_end(audit(place, acknowledged))
    if len(sent) != 1 or not sent[0].startswith("audit "):
        raise SystemExit(f"the audit failed: {sent}")
    for problem in problems:
        print(problem)
    lost, torn, double, seen, repeated, damaged = (int(part) for part in sent[0].split()[1:])
    bad = lost + torn + double + damaged + len(problems)
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
            "groups lost, torn or double after SIGKILL of writer and reader at random moments",
            "0 of ≥ 250,000 acknowledged",
            total["bad"],
            "groups",
            total["bad"] == 0 and (total["acknowledged"] >= 250_000 or not full),
            total["acknowledged"],
            f"{cycles} cycles in {(time.time() - began) / 60:.0f} min, a new log every {CYCLES_PER_LOG}, compaction "
            f"and clean-up running; {total['seen']:,} groups at the end, {total['repeated']} rows repeated after a "
            f"kill and skipped by readers",
        )
    ]
    if faults:
        rows += every_fault()
    return report(not full, *rows)


def one_of_four(place: str, first: int, last: int) -> Work:
    """Append the groups [first, last), a few at a time, and then some that another writer appends, too."""

    def work(send: Send) -> None:
        with ExperienceLog.open(place) as log:
            for start in range(first, last, 25):
                log.append([small(i) for i in range(start, min(start + 25, last))])
            log.append([small(i) for i in range(max(0, first - 10), first)])

    return work


def writers(groups: int) -> bool:
    each = groups // 4
    with tempfile.TemporaryDirectory(prefix="offbeat-torture-") as place:
        began = time.time()
        children = [fork(one_of_four(place, i * each, (i + 1) * each)) for i in range(4)]
        problems = [line for _, pipe in children for line in read_lines(pipe)]
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
    bad = missing + double + unbalanced + len(problems) + sum(map(abs, codes))
    figure = Figure(
        "experience.4",
        "groups missing, double or unaccounted for after four concurrent writers",
        f"0 of {groups:,}",
        bad,
        "groups",
        bad == 0,
        groups,
        f"{groups / seconds:.0f} groups/s in commits of 25; {ledger.repeated} rows repeated on purpose and skipped; "
        f"{ledger}" + (f"; first problem: {problems[0]}" if problems else ""),
    )
    return report(groups < 20_000, figure)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("what", nargs="?", choices=["kill", "writers"], default="kill")
    parser.add_argument("--cycles", type=int, default=10, help="cycles of kill; fewer than 1,000 record nothing")
    parser.add_argument("--groups", type=int, default=20_000, help="groups of writers; fewer record nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-faults", action="store_true", help="skip the faults that strace injects")
    chosen = parser.parse_args()
    # Lance always warns about forks; here no thread of Lance exists before the fork.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    if chosen.what == "writers":
        sys.exit(not writers(chosen.groups))
    sys.exit(not torture(chosen.cycles, chosen.seed, not chosen.no_faults))
