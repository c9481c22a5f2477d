"""The claims of P1 and P2 on the settings that they are made for, with the margins of `lab/learning/protocol.md`."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

from lab.learning.evidence.blocks import P1_LAGS, P1_OBJECTIVES, TUNED
from lab.learning.evidence.claims import Cells, Claim, Paired
from lab.learning.evidence.rows import EvidenceRow, area, final

TOLERATED: Final = -0.03
"""Loss in final pass rate, or in area, that still counts as tolerated."""
IRRELEVANT: Final = 0.02


def slug(name: str) -> str:
    """Return the part of a row's id that names an arm."""
    return name.replace(", ", "-").replace(" = ", "").replace(" ", "-")


def fall(row: EvidenceRow) -> float:
    """Return how far a run ends below its best evaluation."""
    return max(row["curve"]) - final(row)


def fresh_claims(cells: Cells) -> Iterator[Claim]:
    """Yield P2's claims about fresh data: the mask with a KL term, and ten clipped updates of a batch."""
    mask, updates = ("with KL and mask", "with KL"), ("clipped, i = 10", "clipped, i = 1")
    yield _above_0(
        cells, "mask-fresh", "The mask, v = 1 with a KL term: final with minus without", mask, "helps", "harms"
    )
    falls = cells.apart(mask[1], mask[0], fall)
    steadier = "The mask, v = 1 with a KL term: fall from the best evaluation to the end, without minus with"
    yield _above_0(cells, "mask-fresh-fall", steadier, mask, "steadier", "less steady", falls)
    yield _above_0(cells, "i10-fresh", "grpo-masked at v = 1: final of i = 10 minus i = 1", updates, "higher", "lower")
    areas = cells.apart(*updates, area)
    faster = "grpo-masked at v = 1: area of i = 10 minus i = 1, as many groups"
    yield _above_0(cells, "i10-fresh-way", faster, updates, "faster", "slower", areas)


def paper_claims(cells: Cells) -> Iterator[Claim]:
    """Yield P1's claims about a fixed lag of ten steps, about runs that never publish, and about RED at equal KL."""
    for lag in P1_LAGS:
        for name in P1_OBJECTIVES:
            yield from _lag(cells, f"{name} {lag}", f"{name} v1", lag)
        yield _alike(cells, f"rec-oneside-nois {lag}", f"rec-oneside-is {lag}")
        clip = (f"rec-oneside-nois {lag}", f"reinforce {lag}")
        what = f"The clip, {lag}: final of rec-oneside-nois minus reinforce"
        yield _above_0(cells, f"clip-{slug(lag)}", what, clip, "clipping helps", "clipping harms")
        wide = (f"wide clip {lag}", f"rec-oneside-nois {lag}")
        for of, end, words in ((final, "", ("higher", "lower")), (area, "-way", ("faster", "slower"))):
            what = f"The clip (0.6, 2.0), {lag}: {of.__name__} minus that with 0.2"
            yield _above_0(cells, f"wide-{slug(lag)}{end}", what, wide, *words, cells.apart(*wide, of))
    yield _alike(cells, "grpo offset 10", "rec-oneside-is offset 10")
    red = ("red-weight at equal KL", "grpo at equal KL")
    gains = [at_equal_kl(one, other) for one, other in zip(*map(cells.of, red), strict=True)]
    what = "red-weight at v = 1 and equal KL(π ‖ π_0): pass rate minus that of grpo"
    yield _above_0(cells, "red-equal-kl", what, red, "helps", "harms", Paired(red, gains))


def tuned_claims(cells: Cells) -> Iterator[Claim]:
    """Yield the claims of objectives that fail in block a, with other constants, against their v = 1 in block a."""
    for arm in TUNED:
        name, _, v = arm.name.rpartition(" ")
        yield from _lag(cells, arm.name, f"{name.partition(' ')[0]} v1", v.replace("v", "v = "))


def _lag(cells: Cells, lagged: str, fresh: str, lag: str) -> Iterator[Claim]:
    """Yield the claims about what a lag costs: at the end, and on the way."""
    family = "a" if lag.startswith("v") else "p"
    yield Claim(
        f"evidence.{family}.{cells.block.task}.{slug(lagged)}",
        f"{lagged} against {fresh}: difference in final pass rate ({cells.block.task})",
        f"interval above {TOLERATED}",
        cells.apart(lagged, fresh),
        (TOLERATED,),
        f"tolerates {lag}",
        f"fails at {lag}",
        cells.describe(fresh, lagged),
    )
    yield way_claim(cells, family, lagged, fresh)


def way_claim(cells: Cells, family: str, lagged: str, fresh: str) -> Claim:
    """Return the claim about what a lag costs on the way: a lower area is a slower run, whatever its end."""
    return Claim(
        f"evidence.{family}.{cells.block.task}.{slug(lagged)}-way",
        f"{lagged} against {fresh}: difference in area ({cells.block.task})",
        f"interval above {TOLERATED}; slower if it is below 0",
        cells.apart(lagged, fresh, area),
        (TOLERATED,),
        "not slower",
        "slower",
        cells.describe(fresh, lagged),
        below_edge=0.0,
    )


def _alike(cells: Cells, one: str, other: str) -> Claim:
    return Claim(
        f"evidence.p.{cells.block.task}.{slug(one)}-as-{slug(other)}",
        f"{one} minus {other}: final pass rate ({cells.block.task})",
        f"interval within ± {IRRELEVANT}",
        cells.apart(one, other),
        (-IRRELEVANT, IRRELEVANT),
        "alike",
        "differ",
        cells.describe(one, other),
    )


def _above_0(
    cells: Cells, name: str, what: str, arms: tuple[str, str], above: str, below: str, paired: Paired | None = None
) -> Claim:
    return Claim(
        f"evidence.p.{cells.block.task}.{name}",
        f"{what} ({cells.block.task})",
        "interval above 0",
        paired or cells.apart(*arms),
        (0.0,),
        above,
        below,
        cells.describe(*arms),
    )


def at_equal_kl(one: EvidenceRow, other: EvidenceRow) -> float:
    """Return the pass rate of one run minus the other's, at the largest KL that both of them reach."""
    top = min(max(one["kl"]), max(other["kl"]))
    return rate_at(one, top) - rate_at(other, top)


def rate_at(row: EvidenceRow, level: float) -> float:
    """Return the pass rate when KL first reaches a level that it does reach, on lines between evaluations."""
    reached: Sequence[float] = [*accumulate(row["kl"], max)]
    for (before, after), (low, high) in zip(pairwise(row["curve"]), pairwise(reached), strict=True):
        if high >= level:
            return before + (after - before) * (level - low) / (high - low) if high > low else after
    return row["curve"][-1]
