"""Compare the sampler with the one before it, and time its draws: rows rooms.3.draws, rooms.3.distribution, rooms.7.*.

    python -m lab.bench.draws SRC    SRC is the `src` directory of a checkout with the other sampler; three minutes

Fresh and offline draws have to be the same groups; draws from the past the same distribution.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lab.figures import ROOT, Figure, command_parser, machine, record

SCRIPTS, DRAWS, SIZES = 3000, 100_000, (10_000, 100_000, 1_000_000)
GOAL = 0.1


def _parts() -> Any:
    from offbeat.experience import modes, sampler

    try:
        from offbeat.experience.limits import SamplerLimits  # type: ignore[import-not-found]  # the sampler before
    except ImportError:
        SamplerLimits = sampler.SamplerLimits
    return modes, sampler, SamplerLimits


def _rows(first: int, k: int, rng: random.Random) -> Any:
    from offbeat.experience.index import NO_VERSION, Columns

    n = rng.randint(0, 6)
    ripe = [rng.random() < 0.8 for _ in range(n)]
    return Columns(
        ordinal=range(first, first + n),
        oldest_version=[max(NO_VERSION, rng.choice([NO_VERSION, k, k - 1, k - 2, 0, k + 1])) for _ in range(n)],
        task=[0] * n, sources=[1] * n, ripe=ripe, completions=[8] * n,
        scored=[rng.choice([8, 8, 8, 1]) if one else 0 for one in ripe], reward_mean=[0.5] * n,
        reward_std=[rng.choice([0, 0.1, 0.5]) for _ in range(n)], tokens=[9] * n, prompt=range(n),
        guest=[rng.random() < 0.2 for _ in range(n)],
    )  # fmt: skip


def script(seed: int) -> list[str]:
    """Return what a sampler with random settings says and draws on random groups, 25 steps long."""
    from offbeat.experience.index import Columns
    from offbeat.types import GroupDrift

    modes, sampler, limits = _parts()
    rng = random.Random(seed)
    mode = rng.choice([modes.Fresh(), modes.Offline(rng.choice([None, 1, 2]), rng.randint(0, 2))])
    some = limits(rng.randint(1, 4), rng.choice([None, 0, 1, 3]), rng.random() < 0.5,
                  retire_drift=rng.choice([None, 0.5]), retire_age=rng.choice([None, 0, 3]))  # fmt: skip
    one, said, first = sampler.Sampler(mode, some, seed=seed), [], 0
    for k in range(25):
        rows = _rows(first, k, rng)
        one.feed(rows)
        first += len(rows)
        late = np.flatnonzero(~rows.ripe)
        if len(late) and rng.random() < 0.5:
            at = int(late[0])
            values = (int(rows.ordinal[at]), int(rows.oldest_version[at]), 0, 1, True, 8, 8, 0.5, 0.2, 9)
            one.feed(Columns(*([value] for value in values)))
        said.append(repr((sorted(one.waiting(k).items()), one.waiting_count(k), one.unripe)))
        drawn = one.draw(k)
        said.append(repr(drawn))
        if isinstance(drawn, sampler.Draw):
            one.measured({ordinal: GroupDrift((ordinal * k) % 7 / 7, 1.0) for ordinal in drawn.ordinals})
    return said


def _past(n: int, seed: int) -> Any:
    from offbeat.experience.index import Columns

    rng = np.random.default_rng(seed)
    one = np.ones(n)
    return Columns(np.arange(n), rng.choice([-1, 0, 3, 9], n), 0 * one, one, one > 0, 8 * one, 8 * one, one / 2,
                   rng.choice([0.1, 0.3, 0.5], n), 9 * one, np.arange(n))  # fmt: skip


def counts() -> list[int]:
    """Return how often each of 40 groups was replayed, in two batches of four for each of many seeds."""
    modes, sampler, limits = _parts()
    found = np.zeros(40, np.int64)
    rows = _past(40, 1)
    for seed in range(DRAWS // 8):
        one = sampler.Sampler(modes.Replay(share=1.0, reuse_budget=99), limits(4), seed=seed)
        one.feed(rows)
        for k in (10, 11):
            drawn = one.draw(k)
            for ordinal, replayed in zip(drawn.ordinals, drawn.replayed, strict=True):
                found[ordinal] += replayed
    return found.tolist()  # type: ignore[no-any-return]


def seconds(size: int) -> dict[str, float]:
    """Return the median seconds of a draw of 64 groups, by mode, while the log stays as long as it is."""
    modes, sampler, limits = _parts()
    took = {}
    for mode in (modes.Fresh(), modes.Replay(share=0.5, reuse_budget=9), modes.Offline()):
        one = sampler.Sampler(mode, limits(64), seed=1)
        one.feed(_past(size, 2))
        one.draw(9)
        times = []
        for k in range(10, 31):
            began = time.perf_counter()
            one.draw(k)
            times.append(time.perf_counter() - began)
        took[type(mode).__name__.lower()] = median(times)
    return took


def _elsewhere(src: str, what: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "lab.bench.draws", src, "--only", what], cwd=ROOT, check=True,
                          capture_output=True, text=True, env={"PYTHONPATH": f"{src}:{ROOT}", "PATH": ""})  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> bool:
    """Measure, in this process and in one with the other sources."""
    parser = command_parser(__doc__)
    parser.add_argument("src", type=Path)
    parser.add_argument("--only", choices=["scripts", "counts", "seconds"], help="print this; used for both checkouts")
    options = parser.parse_args()
    if options.only:
        made = {"scripts": lambda: [script(seed) for seed in range(SCRIPTS)], "counts": counts,
                "seconds": lambda: [seconds(size) for size in SIZES]}  # fmt: skip
        print(json.dumps(made[options.only]()))
        return True
    own, other = str(ROOT / "src"), str(options.src)
    same = sum(a == b for a, b in zip(_elsewhere(own, "scripts"), _elsewhere(other, "scripts"), strict=True))
    pairs = [(a, b) for a, b in zip(_elsewhere(own, "counts"), _elsewhere(other, "counts"), strict=True) if a + b]
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    freedom = len(pairs) - 1
    limit = freedom + 2.33 * (2 * freedom) ** 0.5  # about the 99th percentile
    took = [(_elsewhere(own, "seconds"), _elsewhere(other, "seconds")) for _ in range(3)]
    figures = [
        Figure("rooms.3.draws", "random scripts of feeds, fresh and offline draws and retirements in which both samplers "
               "say and draw the same", f"{SCRIPTS}", same, "scripts", same == SCRIPTS, SCRIPTS,
               "25 steps each, with guests, late scores, expiry, refill and cooldown"),
        Figure("rooms.3.distribution", "replayed groups, chi-square of both samplers' counts", f"<= {limit:.1f}",
               round(chi_square, 1), "", chi_square <= limit, DRAWS,
               f"{freedom} degrees of freedom; the limit is about the 99th percentile"),
    ]  # fmt: skip
    for at, size in enumerate(SIZES):
        now = {mode: median(ours[at][mode] for ours, _ in took) for mode in took[0][0][at]}
        before = {mode: median(theirs[at][mode] for _, theirs in took) for mode in now}
        told = ", ".join(f"{mode} {1e3 * now[mode]:.2f} ms, before {1e3 * before[mode]:.2f}" for mode in now)
        worst = max(now.values())
        figures.append(
            Figure(f"rooms.7.draw-1e{at + 4}", f"a draw of 64 groups out of {size:,}: the slowest mode",
                   f"<= {1e3 * GOAL:.0f} ms", round(1e3 * worst, 2), "ms", worst <= GOAL, 3 * 21,
                   f"{told}; median of three rounds of 21 draws, by turns; {machine()}")
        )  # fmt: skip
    return record(*figures)


if __name__ == "__main__":
    sys.exit(not main())
