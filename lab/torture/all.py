"""The standing suite: every fault and every attack, in an order drawn from a seed, until the time is up.

    python -m lab.torture.all --minutes 30            what a release runs; row hardening.9 and its table, suite.json
    python -m lab.torture.all --minutes 5 --seed 3    shorter, another order; shown and not recorded
    python -m lab.torture.all --list                  the parts, with their commands

Each part is a lab command in its short form, with a seed of its own where it takes one. It is a process of its own,
and its exit code is the verdict. Every part is tried once before one is tried again. What a failed part printed is kept
in `suite-<seed>/`, in the current directory.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from lab.figures import ROOT, Figure, command_parser, report

MINUTES: Final = 30
TABLE: Final = Path(__file__).with_name("suite.json")
"""What the last full run tried, part by part."""
LIMIT_SECONDS: Final = 900.0
"""A part that takes longer has failed."""

PARTS: Final = {
    "kills of writers and readers of the experience log": "lab.torture.experience --cycles 10 --seed {seed}",
    "four writers at once": "lab.torture.experience writers --groups 2000",
    "broken files of the weight log": "lab.torture.weights mutants --short --seed {seed}",
    "kills of the publisher": "lab.torture.weights kill --short --seed {seed}",
    "many readers of the weight log": "lab.torture.weights fanout --short --seed {seed}",
    "wrong versions": "lab.torture.detect_versions --short",
    "kills of a run with replay": "lab.torture.trainer resume --short --seed {seed}",
    "kills during a save": "lab.torture.trainer checkpoints --short --seed {seed}",
    "lost ranks": "lab.torture.trainer ranks --short --seed {seed}",
    "refused updates": "lab.torture.refused_updates --short --seed {seed}",
    "struck scorers": "lab.torture.scoring --short --seed {seed}",
    "a struck part of a Ray run": "lab.torture.run --seed {small}",
    "a lost Ray node": "lab.torture.nodes --rounds 1",
    "killed owners of vLLM": "lab.torture.engine_owner --short",
    "simulated schedules": "lab.simulation.run --seed {seed}",
    "damage of the weight log": "lab.torture.weight_log_damage --short",
    "damage that fsck must find": "lab.torture.fsck --short",
    "runs in one experience log": "lab.torture.shared_log --short --seed {seed}",
    "many steps": "lab.torture.soak --short",
    "a writer that never pauses": "lab.torture.soak --saturate 10 --short",
    "broken batches": "lab.attacks.bad_batches --short",
    "attacks on the sandbox": "lab.bench.sandbox attacks --short",
    "answers made to be unscorable": "lab.attacks.unscorable answers --short",
    "programs that starve others": "lab.attacks.starvation --short",
    "bad models, tasks and files": "lab.attacks.bad_inputs --short",
}
"""By name, the arguments of `python -m`. `{seed}` is any seed, `{small}` one below 50."""


@dataclass
class Outcome:
    """How often a part was tried."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """The commands that failed."""

    def __str__(self) -> str:
        verdict = f"{len(self.failures)} FAILED" if self.failures else "whole"
        times = f"{len(self.seconds):3} × {median(self.seconds):5.0f} s" if self.seconds else "  not tried"
        return f"{times}  {verdict if self.seconds else ''}"


def schedule(seed: int) -> Iterator[tuple[str, list[str]]]:
    """Yield parts with their commands for ever, each round in another order.

    >>> name, command = next(schedule(seed=1))
    >>> command[1] == "-m" and name in PARTS
    True
    """
    rng = random.Random(seed)
    while True:
        for name in rng.sample(list(PARTS), len(PARTS)):
            arguments = PARTS[name].format(seed=rng.randrange(1_000_000), small=rng.randrange(50))
            yield name, [sys.executable, "-m", *arguments.split()]


def run(minutes: float, seed: int, kept: Path) -> dict[str, Outcome]:
    """Try parts until the time is up; the last one may end."""
    outcomes = {name: Outcome() for name in PARTS}
    deadline = time.monotonic() + 60 * minutes
    for name, command in schedule(seed):
        if time.monotonic() > deadline:
            break
        began, shown = time.monotonic(), " ".join(["python", *command[1:]])
        problem = attempt(command)
        outcomes[name].seconds.append(time.monotonic() - began)
        print(f"{time.strftime('%X')}  {name}: {'FAILED' if problem else 'whole'} ({shown})", flush=True)
        if problem:
            outcomes[name].failures.append(shown)
            kept.mkdir(exist_ok=True)
            (kept / f"{len(list(kept.iterdir()))}.txt").write_text(f"{shown}\n\n{problem}", encoding="utf-8")
    return outcomes


def attempt(command: list[str]) -> str:
    """Run one command; return what it printed if it failed."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        return f"not finished after {LIMIT_SECONDS:.0f} s\n{late.stdout!r}"
    return done.stdout or f"exit code {done.returncode}" if done.returncode else ""


def keep(outcomes: dict[str, Outcome]) -> None:
    """Write the table of docs/measured/hardening.md."""
    table = [
        {
            "part": name,
            "tries": len(one.seconds),
            "seconds": round(median(one.seconds or [0.0])),
            "failed": one.failures,
        }
        for name, one in outcomes.items()
    ]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def figure(outcomes: dict[str, Outcome], minutes: float, seed: int) -> Figure:
    """Row hardening.9."""
    tried = sum(len(one.seconds) for one in outcomes.values())
    failed = [shown for one in outcomes.values() for shown in one.failures]
    missed = [name for name, one in outcomes.items() if not one.seconds]
    note = f"seed {seed}, {minutes:g} minutes, {len(outcomes) - len(missed)} of {len(outcomes)} parts"
    note += f"; not reached: {', '.join(missed)}" if missed else ""
    note += f"; failed: {'; '.join(failed)}" if failed else ""
    return Figure(
        "hardening.9",
        "faults and attacks of the standing suite that a run withstands",
        "all",
        f"{tried - len(failed)} of {tried}",
        "tries",
        not failed and not missed,
        tried,
        note,
    )


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="less than 30 record nothing")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of each part")
    parser.add_argument("--list", action="store_true", help="show the parts and end")
    options = parser.parse_args()
    if options.list:
        print(*(f"{name:52} python -m {arguments}" for name, arguments in PARTS.items()), sep="\n")
        return
    outcomes = run(options.minutes, options.seed, Path(f"suite-{options.seed}"))
    print(*(f"{name:52} {outcome}" for name, outcome in outcomes.items()), sep="\n")
    if options.minutes >= MINUTES:
        keep(outcomes)
    sys.exit(not report(options.minutes < MINUTES, figure(outcomes, options.minutes, options.seed)))


if __name__ == "__main__":
    main()
