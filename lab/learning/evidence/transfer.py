"""Which quantity of a run predicts what its lag costs, also for other lengths, learning rates and models?

    python -m lab.learning.evidence.transfer    seconds; rows transfer.3.* from the cells of block transfer and the kept
                                                runs of SmolLM2-135M

`lab/learning/protocol.md` has the candidates, the two halves of the settings and the rules. A rule predicts the loss as
a factor times a quantity; the factor is fitted to one half of the settings of the sums.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from lab.figures import Figure, command_parser, record
from lab.learning.evidence import bands, smollm2
from lab.learning.evidence.blocks import BLOCKS, SETTINGS, TRANSFER_RATES
from lab.learning.evidence.rows import Done, EvidenceRow, area, final
from lab.learning.evidence.smollm2 import SmolRow
from lab.learning.model import LENGTHS
from lab.learning.statistics import bootstrap, correlation
from lab.lora.curves import FILE as ADAPTERS

GOAL: Final = 0.5
"""The rank correlation on held-out settings that a rule has to reach, with its whole interval."""
MARGIN: Final = 0.08
"""The error on a pretrained model that a rule may have."""
FEWEST: Final = 4
"""Settings from which on a part of them has a rank correlation of its own."""
Quantities = Mapping[str, float]
LOSSES: Final[Mapping[str, int]] = {"area": 0, "final": 1}


@dataclass(frozen=True)
class Measured:
    """One setting with lag, and what was measured of it: the means over its seeds, minus those of its v = 1."""

    name: str
    parts: tuple[str, ...]
    """Length, rate and objective."""
    weighted: bool
    """True if its objective has importance weights, and no band that binds."""
    fitted: bool
    pretrained: bool
    losses: tuple[float, float]
    """In area and in final."""
    quantities: Quantities


def is_fitted(digits: int, rate: float) -> bool:
    """Return whether a setting of the sums belongs to the half that rules are fitted to.

    >>> [(digits, rate) for digits in LENGTHS for rate in TRANSFER_RATES if is_fitted(digits, rate)]
    [(2, 0.00025), (4, 0.001), (8, 0.00025), (16, 0.001), (24, 0.00025)]
    """
    return (LENGTHS.index(digits) + TRANSFER_RATES.index(rate)) % 2 == 0


def quantities(row: EvidenceRow) -> Quantities:
    """Return what may predict the loss of a run on the sums."""
    steps = 5.0 * (len(row["curve"]) - 1)
    found = {"steps-per-publish": steps / max(row["publishes"], 1)}
    for name, metric, turned in (
        ("tv-token", "drift_tv_token", False),
        ("tv-sequence", "drift_tv_sequence", False),
        ("ess", "ess", True),
        ("stopped", "gate_stopped_gradient", False),
        ("cosine", "cosine", True),
    ):
        if metric in row["by_cycle"]:
            for end, value in zip(("", "-at-end"), row["by_cycle"][metric], strict=True):
                found[name + end] = 1 - value if turned else value
        elif metric == "gate_stopped_gradient":  # an objective without a gate that binds stops nothing
            found |= {name: 0.0, f"{name}-at-end": 0.0}
    return found


def of_sums(done: Done, seeds: Sequence[int]) -> list[Measured]:
    """Return the settings of block transfer that have all seeds."""
    found = []
    for setting in SETTINGS:
        rows, fresh = ([done.get((one.arm, one.rate, seed)) for seed in seeds] for one in (setting, setting.fresh))
        pairs = [(one, other) for one, other in zip(rows, fresh, strict=True) if one and other]
        if len(pairs) == len(seeds):
            found.append(
                Measured(
                    setting.arm,
                    (f"{setting.digits} digits", f"lr {setting.rate:g}", setting.objective),
                    setting.objective == "weighted",
                    is_fitted(setting.digits, setting.rate),
                    False,
                    (_lost(area, pairs), _lost(final, pairs)),
                    _apart([(quantities(one), quantities(other)) for one, other in pairs]),
                )
            )
    return found


def _lost(of: Callable[[EvidenceRow], float], pairs: Sequence[tuple[EvidenceRow, EvidenceRow]]) -> float:
    return fmean(of(fresh) - of(lagged) for lagged, fresh in pairs)


def _apart(pairs: Sequence[tuple[Quantities, Quantities]]) -> Quantities:
    """Return by how much each quantity is larger than at v = 1, as a mean over seeds."""
    known = set.intersection(*(set(one) & set(other) for one, other in pairs))
    return {name: fmean(one[name] - other[name] for one, other in pairs) for name in sorted(known)}


PRETRAINED: Final = {
    "off-policy-v10": "off-policy-v1",
    "wide-v10": "nois-v1",
    "nois-v10": "nois-v1",
    "is-v10": "nois-v1",
    "adapter-v10": "adapter-v1",
}
"""Kept runs of SmolLM2-135M and of adapters of it, and their v = 1, where a band stops nothing, whatever its width."""


def of_pretrained() -> list[Measured]:
    """Return the settings of SmolLM2-135M, each with the seeds that it shares with its v = 1."""
    runs = bands.with_plain(smollm2.rows(bands.FILE))
    runs |= {(f"adapter-{arm}", seed): row for (arm, seed), row in smollm2.rows(ADAPTERS).items()}
    found = []
    for lagged, fresh in PRETRAINED.items():
        pairs = [(runs[lagged, s], runs[fresh, s]) for s in smollm2.SEEDS if {(lagged, s), (fresh, s)} <= runs.keys()]
        measured = [_of_smollm2(one) for one, _ in pairs]
        if not pairs:
            continue
        names = set.union(*map(set, measured))
        # At v = 1 each quantity of these runs is that of lag 0, up to the engine gap.
        means = {name: fmean(one[name] for one in measured if name in one) for name in sorted(names)}
        means["steps-per-publish"] -= 1
        losses = tuple(fmean(of(other) - of(one) for one, other in pairs) for of in (bands.area, smollm2.final))
        weighted = lagged.startswith("off-policy")
        found.append(Measured(f"SmolLM2 {lagged}", (), weighted, False, True, (losses[0], losses[1]), means))
    return found


def _of_smollm2(row: SmolRow) -> dict[str, float]:
    """Return what is kept of a run; the first runs kept little."""
    found = {"steps-per-publish": smollm2.EVERY * (len(row["curve"]) - 1) / row["publishes"]}
    if "drift" in row:
        found["tv-token"] = row["drift"]
    if "by_step" not in row:
        return found
    cycle = round(found["steps-per-publish"])
    for name, metric, turned in (
        ("tv-token", "drift_tv_token", False),
        ("tv-sequence", "drift_tv_sequence", False),
        ("ess", "ess", True),
        ("stopped", "gate_stopped_gradient", False),
    ):
        kept = row["by_step"][metric]
        for end, values in (("", kept), ("-at-end", kept[cycle - 1 :: cycle])):
            known = [value for value in values if value is not None]
            if known:
                found[name + end] = 1 - fmean(known) if turned else fmean(known)
    return found


CANDIDATES: Final[Mapping[str, tuple[str, str]]] = {
    "publishes": ("steps-per-publish", "steps-per-publish"),
    "tv-token": ("tv-token", "tv-token"),
    "movement-per-cycle": ("tv-token-at-end", "tv-token-at-end"),
    "tv-sequence": ("tv-sequence", "tv-sequence"),
    "tv-sequence-at-end": ("tv-sequence-at-end", "tv-sequence-at-end"),
    "ess": ("ess", "ess"),
    "ess-at-end": ("ess-at-end", "ess-at-end"),
    "stopped": ("stopped", "stopped"),
    "stopped-at-end": ("stopped-at-end", "stopped-at-end"),
    "cosine": ("cosine", "cosine"),
    "cosine-at-end": ("cosine-at-end", "cosine-at-end"),
    "by-objective": ("stopped", "ess"),
    "by-objective-at-end": ("stopped-at-end", "ess-at-end"),
}
"""The quantity of a band around α, and that of importance weights. If they are two, each has a factor of its own."""


@dataclass(frozen=True)
class Rule:
    """A candidate with the factors that one half of the settings gives it."""

    names: tuple[str, str]
    factors: tuple[float, float]

    @classmethod
    def fit(cls, names: tuple[str, str], settings: Sequence[Measured], loss: int) -> "Rule":
        """Fit the factors by least squares, on lines through 0."""
        parts = [[one for one in settings if one.weighted == weighted] for weighted in (False, True)]
        if names[0] == names[1]:
            parts = [list(settings)] * 2
        factors = [_slope(name, part, loss) for name, part in zip(names, parts, strict=True)]
        return cls(names, (factors[0], factors[1]))

    def predict(self, one: Measured) -> float:
        return self.factors[one.weighted] * one.quantities[self.names[one.weighted]]

    def knows(self, one: Measured) -> bool:
        return self.names[one.weighted] in one.quantities

    def agreement(self, settings: Sequence[Measured], loss: int) -> float:
        """Return the rank correlation of predicted and measured losses."""
        return spearman([self.predict(one) for one in settings], [one.losses[loss] for one in settings])


def _slope(name: str, settings: Sequence[Measured], loss: int) -> float:
    squares = sum(one.quantities[name] ** 2 for one in settings)
    return sum(one.quantities[name] * one.losses[loss] for one in settings) / squares if squares else 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value among them; equal values share theirs.

    >>> ranks([0.3, 0.1, 0.3])
    [1.5, 0.0, 1.5]
    """
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the rank correlation; 0 if all values of one side are the same.

    >>> round(spearman([1, 2, 3, 4], [1, 10, 100, 50]), 3), spearman([1, 1], [1, 2])
    (0.8, 0.0)
    """
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return 0.0
    return correlation(ranks(xs), ranks(ys))


def figures(settings: Sequence[Measured]) -> list[Figure]:
    """Return one row for each candidate and loss, and the rule that the fitted half chooses."""
    fitted = [one for one in settings if one.fitted]
    held = [one for one in settings if not one.fitted and not one.pretrained]
    pretrained = [one for one in settings if one.pretrained]
    found = []
    for loss, place in LOSSES.items():
        rules = {name: Rule.fit(names, fitted, place) for name, names in CANDIDATES.items()}
        chosen = max(rules, key=lambda name: rules[name].agreement(fitted, place))
        found += [_row(name, rule, loss, chosen, fitted, held, pretrained) for name, rule in rules.items()]
    return found


def _row(
    name: str, rule: Rule, loss: str, chosen: str, fitted: Sequence[Measured], held: Sequence[Measured],
    pretrained: Sequence[Measured],
) -> Figure:  # fmt: skip
    place = LOSSES[loss]
    agreement = rule.agreement(held, place)
    low, high = bootstrap(held, lambda some: rule.agreement(some, place))
    worst, where = _worst(rule, held, place)
    errors = [(abs(rule.predict(one) - one.losses[place]), one) for one in pretrained if rule.knows(one)]
    beyond = [one.name for error, one in errors if error > MARGIN]
    holds = low > GOAL and worst > 0 and not beyond
    told = "; ".join(f"{one.name}: {rule.predict(one):+.3f} for {one.losses[place]:+.3f}" for _, one in errors)
    factors = ", ".join(
        f"{factor:.3g} · {what}" for factor, what in dict.fromkeys(zip(rule.factors, rule.names, strict=True))
    )
    why = [
        *([f"interval not above {GOAL}"] if low <= GOAL else []),
        *([f"negative on {where}"] if worst <= 0 else []),
        *([f"off by more than {MARGIN} on {', '.join(beyond)}"] if beyond else []),
    ]
    return Figure(
        f"transfer.3.{name}" + ("" if loss == "area" else f"-{loss}"),
        f"rank correlation of the loss in {loss} predicted from {name} with the measured one, held-out settings",
        f"interval above {GOAL}, no part below 0, error on SmolLM2-135M at most {MARGIN}",
        f"{agreement:.2f} [{low:.2f}, {high:.2f}]",
        "",
        holds,
        len(held),
        (f"{'; '.join(why)}; " if why else "")
        + ("chosen by the fitted half; " if name == chosen else "")
        + f"loss = {factors}; {rule.agreement(fitted, place):.2f} on the {len(fitted)} fitted settings; "
        f"lowest {worst:.2f}, {where}; predicted for measured: {told}",
    )


def _worst(rule: Rule, held: Sequence[Measured], place: int) -> tuple[float, str]:
    """Return the lowest rank correlation within a length, a learning rate or an objective."""
    parts: defaultdict[str, list[Measured]] = defaultdict(list)
    for one in held:
        for part in one.parts:
            parts[part].append(one)
    return min((rule.agreement(some, place), part) for part, some in parts.items() if len(some) >= FEWEST)


def main() -> bool:
    command_parser(__doc__).parse_args()
    block = BLOCKS["transfer"]
    done = block.done()
    seeds = [seed for seed in range(1, block.seeds + 1) if any(key[2] == seed for key in done)]
    whole = [seed for seed in seeds if all((arm.name, arm.rate, seed) in done for arm in block.arms)]
    sums = of_sums(done, whole) if whole else []
    print(f"{len(done)} cells; whole seeds {whole}; {len(sums)} of {len(SETTINGS)} settings of the sums")
    return record(*figures([*sums, *of_pretrained()])) if len(sums) == len(SETTINGS) else False


if __name__ == "__main__":
    main()  # what fails its goal is a result, not an error
