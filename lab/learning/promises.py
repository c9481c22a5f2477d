"""Compare the gain that a batch promises of a publish with the gain that the publish brings.

    python -m lab.learning.promises    about a minute; writes rows run.4.*, promises.4.* and docs/calibration.svg

The promises come from the cells of the sweep. A promise is `unseen` if it was computed before the policy trained on the
batch, and `seen` if it was computed right after. The realized gain is exact: the task is small enough to compute its
pass rate without sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, Literal

from lab.figures import Figure, command_parser, record
from lab.learning.plots import scatter
from lab.learning.rows import MORE_SEEDS, REPORTED, Key, Published, Row, best_rate, rows
from lab.learning.statistics import bootstrap, correlation, slope

FIXED: Final = ("v2", "v5", "v10", "v20")
DRIFT: Final = ("drift-0.05", "drift-0.1")
COST: Final = ("cost-0.25",)
"""With FIXED and DRIFT, the arms whose lag is above 0, so that an unseen batch is informative."""
RULES: Final = {"fixed": FIXED, "drift": DRIFT, "cost": COST}
Z_95: Final = 1.645
ALLOWED: Final = 0.05

When = Literal["unseen", "seen"]


@dataclass(frozen=True)
class Promise:
    """What a batch promised of one publish, with standard errors, and the realized gain."""

    gain: float
    error: float
    normalized: float
    normalized_error: float
    bound: float
    bound_error: float
    tight: float
    tight_error: float
    realised: float
    own: float

    @classmethod
    def of(cls, row: Published, when: When) -> "Promise":

        one = row[when]
        (gain, error), (normalized, normalized_error) = one["gain"], one["normalized"]
        (bound, bound_error), (tight, tight_error) = one["bound_paper"], one["bound_tight"]
        return cls(
            gain,
            error,
            normalized,
            normalized_error,
            bound,
            bound_error,
            tight,
            tight_error,
            one["realised"][0],
            one["own"][0],
        )

    def breaks(self, *, tight: bool = False) -> bool:
        """Return True if the bound is above the realized gain by more than its own error explains, at 95 %."""
        bound, error = (self.tight, self.tight_error) if tight else (self.bound, self.bound_error)
        return bound - Z_95 * error > self.realised


Runs = Sequence[list[Promise]]
Value = Callable[[Promise], float]


def plain(one: Promise) -> float:
    return one.gain


def normalized(one: Promise) -> float:
    return one.normalized


def realised(one: Promise) -> float:
    return one.realised


def promises(arms: Sequence[str], when: When) -> list[list[Promise]]:
    """Return the promises by run: the reported seeds at each arm's own rate, and further seeds where there are some."""
    done = rows()
    seeds = (*REPORTED, *MORE_SEEDS)
    cells = [
        done[arm, rate_of(arm, done), seed] for arm in arms for seed in seeds if (arm, rate_of(arm, done), seed) in done
    ]
    return [[Promise.of(one, when) for one in cell["published"] if when in one] for cell in cells]


def rate_of(arm: str, done: dict[Key, Row]) -> float:
    """Return an arm's own learning rate. A cadence by cost is not tuned; it has that of v = 5."""
    return best_rate("v5" if arm in COST else arm, done)


def values(runs: Runs, of: Value) -> list[float]:
    return [of(one) for run in runs for one in run]


def share(runs: Runs, test: Callable[[Promise], bool]) -> float:
    return fmean(values(runs, test))


@dataclass(frozen=True)
class Measured:
    """A figure over many runs, with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, runs: Runs, figure: Callable[[Runs], float]) -> "Measured":
        return cls(figure(runs), *bootstrap(runs, figure))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def correlated(runs: Runs, of: Value) -> Measured:
    """Return the correlation of promised and realized gain."""
    return Measured.of(runs, lambda some: correlation(values(some, of), values(some, realised)))


def own(one: Promise) -> float:
    return one.own


def calibrated(runs: Runs, of: Value, exact: Value = realised) -> Measured:
    """Return the slope of promised on exact gain. The exact gain has no noise, so nothing flattens the line."""
    return Measured.of(runs, lambda some: slope(values(some, exact), values(some, of)))


def means(runs: Runs, of: Value, exact: Value = realised) -> str:
    return f"mean promise {fmean(values(runs, of)):.3f}, exact {fmean(values(runs, exact)):.3f}"


def main() -> bool:
    command_parser(__doc__).parse_args()
    every = [*FIXED, *DRIFT, *COST]
    unseen, seen, fresh = promises(every, "unseen"), promises(every, "seen"), promises(["v1"], "seen")
    scatter({"before it is trained on": unseen, "after it was trained on": seen})
    normal = "the same, ratios divided by their sum in each group"
    return record(
        _correlation("run.4.correlation", "gain promised by a batch not yet trained on", unseen, seen, plain),
        _correlation("run.4.correlation-normalised", normal, unseen, seen, normalized),
        _calibration("run.4.calibration", FIXED, plain, realised, f"just trained at v = 1: {means(fresh, plain)}"),
        _calibration("run.4.calibration-drift", DRIFT, plain, realised),
        _violations([*unseen, *seen, *fresh]),
        *(_calibration(f"promises.4.{rule}", arms, normalized, own) for rule, arms in RULES.items()),
    )


def _correlation(name: str, how: str, unseen: Runs, seen: Runs, of: Value) -> Figure:
    one = correlated(unseen, of)
    return Figure(
        name,
        f"Publishes: {how}, against the realized gain: correlation",
        "above 0",
        str(one),
        "",
        one.low > 0,
        len(values(unseen, of)),
        f"{len(unseen)} runs of {', '.join((*FIXED, *DRIFT, *COST))}; 95 % interval by drawing whole runs. "
        f"By the batch just trained on {correlated(seen, of)}",
    )


def _calibration(name: str, arms: Sequence[str], of: Value, exact: Value, note: str = "") -> Figure:
    """Return the slope of promised on exact gain. `exact` is over all sums, or over the batch's own prompts."""
    unseen, seen = promises(arms, "unseen"), promises(arms, "seen")
    one, form = calibrated(unseen, of, exact), "predicted_gain" if of is normalized else "predicted_gain_plain"
    other = plain if of is normalized else normalized
    prompts, others = ("all sums", own) if exact is realised else ("the prompts of the batch", realised)

    def expected(promise: Promise) -> bool:
        error = promise.normalized_error if of is normalized else promise.error
        return abs(of(promise) - exact(promise)) <= 1.96 * error

    return Figure(
        name,
        f"{form} per exact gain on {prompts} (slope), by a batch not yet trained on; {', '.join(arms)}",
        "interval holds 1",
        str(one),
        "",
        one.low <= 1 <= one.high,
        len(values(unseen, of)),
        f"{len(unseen)} runs; {means(unseen, of, exact)}; {share(unseen, expected):.0%} of promises within 1.96 "
        f"standard errors; the other form {calibrated(unseen, other, exact)}. Against the exact gain on "
        f"{'the prompts of the batch' if exact is realised else 'all sums'} {calibrated(unseen, of, others)}, "
        f"{means(unseen, of, others)}. By the batch just trained on {calibrated(seen, of, exact)}, "
        f"{means(seen, of, exact)}" + (f"; {note}" if note else ""),
    )


def _violations(every: Runs) -> Figure:
    """Return how often the bound on the gain of a publish is violated, over all batches."""
    broken, tight = share(every, Promise.breaks), share(every, lambda one: one.breaks(tight=True))
    above = share(every, lambda one: one.bound > one.realised)
    positive, middle = share(every, lambda one: one.bound > 0), median(values(every, lambda one: one.bound))
    return Figure(
        "run.4.violations",
        "Publishes whose bound is above the realized gain by more than its standard error explains",
        f"<= {ALLOWED:.0%}",
        round(100 * broken, 2),
        "%",
        broken <= ALLOWED,
        len(values(every, realised)),
        f"one-sided 95 %; the estimate is above the gain in {above:.1%}, with the constant 1 broken in {tight:.1%}; "
        f"the bound is above 0, so that it promises anything, in {positive:.1%}; its median is {middle:.2f}",
    )


if __name__ == "__main__":
    raise SystemExit(not main())
