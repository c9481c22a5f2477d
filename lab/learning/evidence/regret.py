"""The worst regret of each publishing rule over the conditions of block b, stated beside the verdicts.

The regret in a condition is the area of the best fixed v, chosen after the fact, minus the area of the rule with its
one setting. It is negative if the rule is better than every fixed v.
"""

from collections.abc import Sequence
from statistics import fmean

from lab.figures import Figure
from lab.learning.evidence.blocks import CONDITION_RATES, FIXED_LAGS, RULES, at_rate
from lab.learning.evidence.claims import Cells
from lab.learning.evidence.rows import area


def regret_figures(blocks: Sequence[Cells]) -> list[Figure]:
    """Return one row for each rule. `blocks` are the cells of all conditions: one block for each number of prompts."""
    return [_worst(rule.name, blocks) for rule in RULES]


def _worst(rule: str, blocks: Sequence[Cells]) -> Figure:
    regrets: dict[str, float] = {}
    for cells in blocks:
        for rate in CONDITION_RATES:
            best = max((f"v{v}" for v in FIXED_LAGS), key=lambda name: _area(cells, name, rate))
            regret = _area(cells, best, rate) - _area(cells, rule, rate)
            regrets[f"{cells.block.task} at lr {rate:g}, best {best}"] = regret
    return Figure(
        f"evidence.b.regret.{rule.replace(' ', '-')}",
        f"Worst regret of {rule} over {len(regrets)} conditions: area of the best fixed v minus that of the rule",
        "stated, no goal",
        round(max(regrets.values()), 4),
        "area",
        True,
        blocks[0].block.seeds,
        "; ".join(f"{condition}: {regret:+.4f}" for condition, regret in regrets.items()),
    )


def _area(cells: Cells, arm: str, rate: float) -> float:
    return fmean(map(area, cells.of(at_rate(arm, rate))))
