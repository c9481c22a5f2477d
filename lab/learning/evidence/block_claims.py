"""What each block of the evidence claims, with the words and margins of `lab/learning/protocol.md`."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from lab.learning.evidence.blocks import ALONE, LAGS, P2_BASES, RULES, SUPERVISED, WALL_CLOCK, Block
from lab.learning.evidence.claims import Cells, Claim, Verdict, judge
from lab.learning.evidence.paper_claims import (
    IRRELEVANT,
    TOLERATED,
    fresh_claims,
    paper_claims,
    slug,
    tuned_claims,
    way_claim,
)
from lab.learning.evidence.rows import EVERY, EvidenceRow, area
from lab.learning.statistics import Interval

GOAL: Final = 0.80
"""The pass rate that block d counts generated groups to."""
HALF: Final = 0.60
NO_LOSS: Final = -0.02
NO_USE: Final = 0.005
"""An area gained by timing that is too small to matter."""
OVERLAPPED: Final = 0.55
"""Time of a step whose generation and training overlap, in steps that do one after the other: 8.74 s of training over
15.81 s of both, in row throughput.1.limit-48-32."""


def objectives_of(block: Block) -> list[str]:
    """Return the objectives of block a; each has one arm for every lag."""
    return list(dict.fromkeys(arm.name.rpartition(" v")[0] for arm in block.arms))


def objective_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block a: which objective tolerates which lag, and whether importance sampling matters."""
    task = cells.block.task
    for name in objectives_of(cells.block):
        for v in LAGS[1:]:
            yield Claim(
                f"evidence.a.{task}.{slug(name)}-v{v}",
                f"{name} tolerates v = {v}: final pass rate minus that at v = 1 ({task})",
                f"interval above {TOLERATED}",
                cells.apart(f"{name} v{v}", f"{name} v1"),
                (TOLERATED,),
                f"tolerates v = {v}",
                f"fails at v = {v}",
                cells.describe(f"{name} v1", f"{name} v{v}"),
            )
    yield _importance_sampling(cells, f"evidence.a.{task}.importance-sampling")


def way_claims(cells: Cells) -> Iterator[Claim]:
    """Yield, for each objective and lag of block a, the claim about the way: is it slower than at v = 1?"""
    for name in objectives_of(cells.block):
        for v in LAGS[1:]:
            yield way_claim(cells, "a", f"{name} v{v}", f"{name} v1")


def lag_verdicts(cells: Cells) -> dict[tuple[str, str], Verdict]:
    """Return the verdicts of block a by their two arms, the longer lag first."""
    return {verdict.claim.paired.arms: verdict for verdict in judge(list(objective_claims(cells)))}


def way_verdicts(cells: Cells) -> dict[tuple[str, str], Verdict]:
    """Return the verdicts about the way, likewise."""
    return {verdict.claim.paired.arms: verdict for verdict in judge(list(way_claims(cells)))}


def high_rate_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claim about importance sampling at a learning rate that is the same for both, and high."""
    yield _importance_sampling(cells, f"evidence.a.{cells.block.task}.importance-sampling-high-rate")


def _importance_sampling(cells: Cells, name: str) -> Claim:
    nois, sampled = f"rec-oneside-nois v{LAGS[-1]}", f"rec-oneside-is v{LAGS[-1]}"
    return Claim(
        name,
        f"Importance sampling is irrelevant at v = {LAGS[-1]}: final without minus with it ({cells.block.task})",
        f"interval within ± {IRRELEVANT}",
        cells.apart(nois, sampled),
        (-IRRELEVANT, IRRELEVANT),
        "irrelevant",
        "matters",
        cells.describe(nois, sampled),
    )


def rare_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims about RED when few answers are right."""
    plain = "rec-oneside-nois v1"
    for name in ("red-weight", "red-drop"):
        yield Claim(
            f"evidence.a.{cells.block.task}.{name}",
            f"{name} helps from a start of 0.05: area minus that of rec-oneside-nois, v = 1",
            "interval above 0",
            cells.apart(f"{name} v1", plain, area),
            (0.0,),
            "helps",
            "harms",
            cells.describe(plain, f"{name} v1"),
        )


def crossing(curve: Sequence[float]) -> float | None:
    """Return after how many evaluations the pass rate is 0.80, on straight lines between them; None if it never is.

    >>> round(crossing([0.2, 0.7, 0.9]), 3)
    1.5
    """
    for place, (before, after) in enumerate(pairwise(curve)):
        if after >= GOAL:
            return place + (GOAL - before) / (after - before)
    return None


def groups_to_goal(row: EvidenceRow) -> float:
    """Return the groups generated until the pass rate is 0.80. A run that never gets there counts with all of them."""
    where = crossing(row["curve"])
    if where is None:
        return row["groups"][-1]
    before, after = row["groups"][int(where)], row["groups"][math.ceil(where)]
    return before + (where - int(where)) * (after - before)


def reuse_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block d: does replay halve the samples?"""
    task = cells.block.task
    for arm in ("replay", "replay retired by drift"):
        reached = ", ".join(
            f"{name} {fmean(map(groups_to_goal, cells.of(name))):.0f}" for name in ("fresh 16", "fresh 8", arm)
        )
        yield Claim(
            f"evidence.d.{task}.{slug(arm)}-samples",
            f"Generated groups until {GOAL}, {arm} over fresh 16 ({task})",
            f"interval below {HALF}",
            cells.apart("fresh 16", arm, lambda row: math.log(groups_to_goal(row))),
            (-math.log(HALF),),
            "halves the samples",
            "does not halve the samples",
            f"groups: {reached}",
            lambda x: math.exp(-x),
        )
        yield Claim(
            f"evidence.d.{task}.{slug(arm)}-final",
            f"Final pass rate of {arm} minus that of fresh 16 ({task})",
            f"interval above {NO_LOSS}",
            cells.apart(arm, "fresh 16"),
            (NO_LOSS,),
            "loses nothing",
            "loses",
            cells.describe("fresh 16", arm, "fresh 8", "fresh 8, i = 2"),
        )


def p2_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block f: what each change of P2 does on its own."""
    task, plain = cells.block.task, cells.block.arms[0].name
    for arm in cells.block.arms[1:]:
        base = P2_BASES.get(arm.name, plain)
        yield Claim(
            f"evidence.f.{task}.{slug(arm.name)}",
            f"grpo-off-policy at v = 10 {arm.name}: final pass rate minus that of the run {base} ({task})",
            "interval above 0",
            cells.apart(arm.name, base),
            (0.0,),
            "helps",
            "harms",
            cells.describe(base, arm.name),
        )


def group_size_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claim of block g: do shrunk advantages help the smallest groups?"""
    task = cells.block.task
    yield Claim(
        f"evidence.g.{task}.shrunk",
        f"G = 2: final pass rate with shrunk advantages minus centered ones ({task})",
        "interval above 0",
        cells.apart("shrunk G2", "centred G2"),
        (0.0,),
        "helps",
        "harms",
        cells.describe(*(arm.name for arm in cells.block.arms)),
    )


def others_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block e: do the answers of another model help, and more than supervised training on them?"""
    for arm in cells.block.arms[1:]:
        for other, above, below in ((ALONE, "helps", "harms"), (SUPERVISED, "beats it", "is worse")):
            if arm.name != other:
                yield Claim(
                    f"evidence.e.{cells.block.task}.{slug(arm.name)}-{'alone' if other == ALONE else 'supervised'}",
                    f"400 fresh groups, {arm.name}: final pass rate minus that of {other}",
                    "interval above 0",
                    cells.apart(arm.name, other),
                    (0.0,),
                    above,
                    below,
                    cells.describe(other, arm.name),
                )


def timing_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block b: does a rule choose better moments than chance or equal gaps?"""
    for rule in RULES:
        for how, named in (("shuffled", "its own gaps in a random order"), ("even", "equal gaps")):
            publishes = fmean(row["publishes"] for row in cells.of(rule.name))
            areas = [Interval.of([area(row) for row in cells.of(name)]) for name in (rule.name, f"{rule.name} {how}")]
            yield Claim(
                f"evidence.b.{cells.block.task}.{slug(rule.name)}-{how}",
                f"Timing of {rule.name} helps: area minus that of {named}, as many publishes (the task changes)",
                f"interval above 0; of no use below {NO_USE}",
                cells.apart(rule.name, f"{rule.name} {how}", area),
                (0.0,),
                "timing helps",
                "timing is of no use",
                f"{publishes:.1f} publishes in 200 steps; areas {areas[0]} and {areas[1]}",
                below_edge=NO_USE,
            )


def seconds_to_goal(row: EvidenceRow, cost: float, step_seconds: float = 1.0) -> float:
    """Return the simulated seconds until the pass rate is 0.80, if a publish costs `cost` seconds."""
    where = crossing(row["curve"])
    steps = EVERY * (len(row["curve"]) - 1 if where is None else where)
    return steps * step_seconds + cost * sum(step <= steps for step in row["published"])


def wall_clock_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of block c: which cadence is faster than v = 1, in simulated time?"""
    for cost in (0.1, 1.0, 5.0):

        def seconds(row: EvidenceRow, cost: float = cost) -> float:
            return math.log(seconds_to_goal(row, cost, OVERLAPPED if row["arm"] == "concurrent" else 1.0))

        fixed = [arm.name for arm in WALL_CLOCK if arm.name.startswith("v") and arm.name != "v1"]
        best = min(fixed, key=lambda name: fmean(map(seconds, cells.of(name))))
        for name in (best, "drift", f"cost {cost:g}", "concurrent"):
            yield Claim(
                f"evidence.c.{cells.block.task}.{slug(name)}-{cost:g}",
                f"A publish costs {cost:g} steps: simulated time of v = 1 until {GOAL} over that of {name}",
                "interval above 1",
                cells.apart("v1", name, seconds),
                (0.0,),
                "faster",
                "slower",
                f"{'the best fixed v; ' if name == best else ''}seconds are simulated, a step takes one; the published "
                "1.35 (arXiv 2505.22257) is measured throughput; " + cells.describe("v1", name),
                math.exp,
            )


CLAIMS: Final = {
    "d-sums": reuse_claims,
    "a-sums": objective_claims,
    "p2-sums": fresh_claims,
    "p1-sums": paper_claims,
    "a-sums-tuned": tuned_claims,
    "a-sums-high-rate": high_rate_claims,
    "a-rare-sums": rare_claims,
    "g-sums": group_size_claims,
    "f-sums": p2_claims,
    "e-sums": others_claims,
    "b-changing": timing_claims,
    "c-sums": wall_clock_claims,
    "d-sorting": reuse_claims,
    "a-sorting": objective_claims,
}
"""By block. The conditions of block b are not judged; `regret.py` states what they give."""
WAYS: Final = {"a-sums": way_claims, "a-sorting": way_claims}
"""Claims about areas that came later: a family of their own."""
