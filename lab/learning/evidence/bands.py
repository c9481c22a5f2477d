"""Train SmolLM2-135M on vLLM with other bands than 0.2 around α: is it lag, or the band, that costs?

    python -m lab.learning.evidence.bands --minutes 60    train missing runs, a quarter of an hour each; the same
                                                          command continues; rows door.3.* of what is complete
    python -m lab.learning.evidence.bands --minutes 0     compute rows and the figure again
    python -m lab.learning.evidence.bands --arms is-v10   only these arms; two such commands on other arms may run
                                                          side by side, each pinned to a core with taskset
    python -m lab.learning.evidence.bands --short         one run of two steps, nothing kept

`lab/learning/protocol.md` has the arms and the rules. The runs of rec-oneside-nois with 0.2 are those of
`python -m lab.learning.evidence.smollm2`. A finished run is one line of `lab/learning/evidence/smollm2-bands.jsonl`;
`docs/smollm2-by-publishes.svg` is drawn from those arms that have at least three seeds.
"""

import time
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Final

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

from lab.figures import Figure, record
from lab.learning.evidence.claims import Claim, Paired, Verdict, judge
from lab.learning.evidence.rows import KEPT
from lab.learning.evidence.smollm2 import (
    EVERY,
    LOSS,
    SEEDS,
    Runs,
    Settings,
    SmolRow,
    describe,
    final,
    rows,
    run,
    sweep_parser,
    train_missing,
)
from lab.learning.evidence.smollm2 import FILE as PLAIN
from lab.learning.plots import COLORS, plain, save
from lab.learning.statistics import Interval
from offbeat.run.journal import Phase

OFF_POLICY: Final = "objective.preset=grpo-off-policy"
SYNC: Final = (Phase.PUBLISHING, Phase.LOADING)
WIDE: Final = "objective.clip=[0.6, 2.0]"
WAVES: Final[tuple[dict[str, Settings], ...]] = (
    {"off-policy-v10": (OFF_POLICY, "sync.every=10")},
    {"off-policy-v1": (OFF_POLICY, "sync.every=1")},
    {"wide-v10": (WIDE, "sync.every=10")},
    {"wide-v1": (WIDE, "sync.every=1")},
    {"is-v10": ("objective.preset=rec-oneside-is", "sync.every=10")},
    {
        "off-policy-v20-80": (OFF_POLICY, "sync.every=20", "steps=80"),
        "off-policy-v40-80": (OFF_POLICY, "sync.every=40", "steps=80"),
    },
    {
        "off-policy-replay": (
            OFF_POLICY,
            "sync.every=1",
            "sampler.mode=replay",
            "sampler.share=0.5",
            "sampler.reuse_budget=4",
        )
    },
    {
        "off-policy-v10-1e-5": (OFF_POLICY, "sync.every=10", "optimizer.learning_rate=1e-5"),
        "off-policy-v1-1e-5": (OFF_POLICY, "sync.every=1", "optimizer.learning_rate=1e-5"),
    },
)
"""In the order of training; the arms of one wave take turns by seed."""
ARMS: Final = {arm: settings for wave in WAVES for arm, settings in wave.items()}
LAGGED: Final = (("off-policy-v10", "off-policy-v1"), ("wide-v10", "wide-v1"), ("nois-v10", "nois-v1"))
SHOWN_FROM: Final = 3
"""Seeds. Verdicts wait for all of them."""
Complete = dict[str, list[SmolRow]]
"""The runs of the arms that have all seeds."""
FILE: Final = KEPT / "smollm2-bands.jsonl"


def area(row: SmolRow) -> float:
    """Return the mean of all evaluations."""
    return fmean(row["curve"])


def with_plain(done: Runs) -> Runs:
    """Return the runs together with the kept ones of rec-oneside-nois, whose band is 0.2."""
    return done | {(f"nois-{arm}", seed): row for (arm, seed), row in rows(PLAIN).items() if arm != "replay"}


def complete_arms(done: Runs) -> Complete:
    """Return the runs of the arms that have all seeds, those of rec-oneside-nois included."""
    runs = with_plain(done)
    arms = dict.fromkeys(arm for arm, _ in runs)
    return {arm: [runs[arm, seed] for seed in SEEDS] for arm in arms if all((arm, seed) in runs for seed in SEEDS)}


def shown_arms(done: Runs) -> Complete:
    """Return the runs of the arms that have at least `SHOWN_FROM` seeds, for figures that say how many they have."""
    runs = with_plain(done)
    found = {arm: [runs[arm, seed] for seed in SEEDS if (arm, seed) in runs] for arm, _ in runs}
    return {arm: kept for arm, kept in found.items() if len(kept) >= SHOWN_FROM}


def figures(done: Runs) -> list[Figure]:
    """Return the final of each arm with at least three seeds, and the verdicts on arms that have all seeds."""
    ends = [figure for arm, kept in shown_arms(done).items() for figure in (_end(arm, kept), _sync(arm, kept))]
    return [*ends, *(verdict.figure() for verdict in verdicts(complete_arms(done)))]


def _end(arm: str, kept: list[SmolRow]) -> Figure:
    curve = ", ".join(f"{fmean(evaluation):.3f}" for evaluation in zip(*(row["curve"] for row in kept), strict=True))
    missing = len(SEEDS) - len(kept)
    return Figure(
        f"door.3.{arm}",
        f"SmolLM2-135M on vLLM, {arm}: final pass@1",
        f"{len(SEEDS)} seeds",
        str(Interval.of([final(row) for row in kept])),
        "",
        not missing,
        len(kept),
        f"{f'{missing} seeds are not trained yet; ' if missing else ''}every ten steps {curve}; "
        f"area {Interval.of([area(row) for row in kept])}; {_steps(kept)}{describe(kept)}",
    )


def _sync(arm: str, kept: list[SmolRow]) -> Figure:
    spent = [[row["seconds"].get(phase, 0.0) for phase in SYNC] for row in kept]
    shares = [sum(one) / sum(row["seconds"].values()) for one, row in zip(spent, kept, strict=True)]
    return Figure(
        f"door.3.{arm}-sync",
        f"SmolLM2-135M on vLLM, {arm}: share of a run's seconds in which weights are published and loaded",
        "stated",
        f"{100 * fmean(shares):.0f}",
        "%",
        True,
        len(kept),
        f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %; {_cores(kept)}, other work beside; the start of vLLM "
        "counts",
    )


def _cores(kept: list[SmolRow]) -> str:
    return " and ".join(f"{n} on {word}" for word, n in sorted(Counter(_word(row) for row in kept).items()))


def _word(row: SmolRow) -> str:
    return "one core" if row.get("cores") == 1 else "two cores"


def _steps(kept: list[SmolRow]) -> str:
    """Return what was measured at the last step of each cycle of ten, over all seeds."""
    if not all("by_step" in row for row in kept):
        return ""
    parts = []
    for name in kept[0]["by_step"]:
        ends = [value for row in kept for value in row["by_step"][name][9::10] if value is not None]
        if ends:
            parts.append(f"{name} {fmean(ends):.3f}")
    return f"at every tenth step {', '.join(parts)}; "


def verdicts(complete: Complete) -> list[Verdict]:
    """Return the verdicts of the protocol on all comparisons whose arms are complete, as one family."""
    claims = []
    for lagged, fresh in LAGGED:
        if {lagged, fresh} <= complete.keys():
            claims += [_lower_end(lagged, fresh, complete), _slower(lagged, fresh, complete)]
    for arm in ("off-policy-v10", "wide-v10"):
        if arm in complete:
            claims.append(_decides(arm, complete))
    if "is-v10" in complete:
        claims.append(_irrelevant(complete))
    return judge(claims)


def _paired(one: str, other: str, complete: Complete, of: Callable[[SmolRow], float] = final) -> Paired:
    return Paired((one, other), [of(a) - of(b) for a, b in zip(complete[one], complete[other], strict=True)])


def _lower_end(lagged: str, fresh: str, complete: Complete) -> Claim:
    return Claim(
        f"door.3.{lagged}-end",
        f"SmolLM2-135M on vLLM: final pass@1 of {lagged} minus that of {fresh}",
        f"interval above {LOSS}",
        _paired(lagged, fresh, complete),
        (LOSS,),
        "no lower end",
        "a lower end",
        "paired by seed",
    )


def _slower(lagged: str, fresh: str, complete: Complete) -> Claim:
    return Claim(
        f"door.3.{lagged}-way",
        f"SmolLM2-135M on vLLM: area of {lagged} minus that of {fresh}",
        f"interval above {LOSS}; slower if it is below 0",
        _paired(lagged, fresh, complete, area),
        (LOSS,),
        "not slower",
        "slower",
        "paired by seed",
        below_edge=0.0,
    )


def _decides(arm: str, complete: Complete) -> Claim:
    return Claim(
        f"door.3.{arm}-band",
        f"SmolLM2-135M on vLLM: final pass@1 of {arm} minus that of nois-v10",
        "interval above 0",
        _paired(arm, "nois-v10", complete),
        (0.0,),
        "the band decides",
        "the narrow band is better",
        "paired by seed",
    )


def _irrelevant(complete: Complete) -> Claim:
    return Claim(
        "door.3.is-v10-sampling",
        "SmolLM2-135M on vLLM: final pass@1 of is-v10 minus that of nois-v10",
        f"interval within {LOSS} and {-LOSS}",
        _paired("is-v10", "nois-v10", complete),
        (LOSS, -LOSS),
        "importance sampling is irrelevant",
        "importance sampling matters",
        "paired by seed",
    )


DRAWN: Final = {
    "off-policy-v1": ("grpo-off-policy, v = 1", COLORS[0], "--"),
    "off-policy-v10": ("grpo-off-policy, v = 10", COLORS[0], "-"),
    "wide-v1": ("rec-oneside-nois, clip (0.6, 2.0), v = 1", COLORS[1], "--"),
    "wide-v10": ("rec-oneside-nois, clip (0.6, 2.0), v = 10", COLORS[1], "-"),
    "nois-v1": ("rec-oneside-nois, clip 0.2, v = 1", COLORS[2], "--"),
    "nois-v10": ("rec-oneside-nois, clip 0.2, v = 10", COLORS[2], "-"),
}


def draw(shown: Complete) -> None:
    """Plot the pass rate against steps, and against publishes, with intervals over seeds."""
    _, (by_step, by_publish) = plt.subplots(1, 2, figsize=(7.6, 3.4), sharey=True)
    for arm, (label, color, line) in DRAWN.items():
        if arm not in shown:
            continue
        if len(shown[arm]) < len(SEEDS):
            label += f" ({len(shown[arm])} seeds)"
        points = [Interval.of(rates) for rates in zip(*(row["curve"] for row in shown[arm]), strict=True)]
        steps = [EVERY * place for place in range(len(points))]
        publishes = fmean(row["publishes"] for row in shown[arm])
        for axes, xs in ((by_step, steps), (by_publish, [publishes * step / steps[-1] for step in steps])):
            axes.plot(xs, [point.mean for point in points], line, color=color, linewidth=1.8, label=label)
            axes.fill_between(
                xs, [p.low for p in points], [p.high for p in points], color=color, alpha=0.12, linewidth=0
            )
    plain(by_step, "steps", "pass rate")
    plain(by_publish, "publishes", "")
    by_publish.legend(frameon=False, fontsize=8, loc="lower right")
    save("smollm2-by-publishes.svg")


def main() -> None:
    parser = sweep_parser(__doc__)
    parser.add_argument("--arms", default=",".join(ARMS), help="train only these, separated by commas")
    options = parser.parse_args()
    chosen = options.arms.split(",")
    if unknown := set(chosen) - ARMS.keys():
        parser.error(f"--arms {options.arms}: no {', '.join(sorted(unknown))}; choose among {', '.join(ARMS)}")
    if options.short:
        print(run("off-policy-v10", ARMS["off-policy-v10"], 101, steps=2))
        return
    minutes = options.minutes
    for wave in WAVES:
        began = time.monotonic()
        train_missing({arm: wave[arm] for arm in wave if arm in chosen}, FILE, minutes, run)
        minutes -= (time.monotonic() - began) / 60
    record(*figures(rows(FILE)))
    draw(shown_arms(rows(FILE)))


if __name__ == "__main__":
    main()
