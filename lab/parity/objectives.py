"""Check that every setting of every objective has an effect or is refused, and every gradient against plain float64.

    python -m lab.parity.objectives            2 minutes; writes rows promises.6.knobs, promises.7.new, promises.7.all
    python -m lab.parity.objectives --short    a few batches of each; records nothing

A setting of [objective] is tried with every preset, with one and with two updates a batch. `parse` refuses it, or the
gradient of the loss differs from that without it, on a batch with lag, truncated completions and groups of equal
rewards. Gradients are compared with autograd on the published formulas, which tests/objective/naive.py writes as loops.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lab.figures import ROOT, Figure, command_parser, report
from offbeat.config import parse
from offbeat.errors import ConfigError
from offbeat.objective.credit import assign_credit
from offbeat.objective.gates import gate_batch
from offbeat.objective.losses import Streams, counts, log_ratios, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Aggregate, Objective

NEW = ("opmd-token", "m2po", "ess-gate")
TOLERANCE = 1e-6
B, G, T = 24, 4, 6


@dataclass(frozen=True)
class Change:
    """One setting of [objective] with a value far from the published one, and the settings it needs beside it."""

    knob: str
    value: Any
    beside: tuple[tuple[str, Any], ...] = ()

    def settings(self, preset: str) -> dict[str, Any]:
        """Return the table [objective] with this change; some values depend on what the preset has already."""
        objective, value = PRESETS[preset].objective, self.value
        if self.knob == "zero_variance_mask":
            value = not objective.zero_variance_mask
        if self.knob == "aggregate" and objective.aggregate == value:
            value = Aggregate.TOKEN_MEAN.value
        return self.without(preset) | {self.knob: value}

    def without(self, preset: str) -> dict[str, Any]:
        return {"preset": preset} | dict(self.beside)


CHANGES = (
    Change("advantage", "leave-one-out"),
    Change("advantage", "shrunk"),
    Change("advantage", "shrunk", (("zero_variance_mask", False),)),
    Change("epsilon", 0.5),
    Change("prior_halflife", 10.0),
    Change("baseline_shift", 0.3),
    Change("truncated", "mask"),
    Change("zero_variance_mask", None),
    Change("clip", [0.01, 0.01]),
    Change("outer_clip", [0.3, 0.3]),
    Change("m2_limit", 1e-4),
    Change("weight_cap", 1.1),
    Change("correction_cap", 1.1),
    Change("reject_band", [0.999, 1.001]),
    Change("min_ess", 0.999),
    Change("temperature", 0.3),
    Change("temperature_range", [2.0, 3.0]),
    Change("exponent_cap", 1e-3),
    Change("tau", 1.0),
    Change("aggregate", Aggregate.SEQUENCE_MEAN_TOKEN_SUM.value),
    Change("kl_coefficient", 0.1),
    Change("kl_estimator", "k2"),
    Change("kl_estimator", "k2", (("kl_coefficient", 0.1),)),
)


@dataclass(frozen=True)
class LaggedBatch:
    """B groups with drift from none to large, truncated completions, and two groups of equal rewards."""

    rewards_BG: Tensor
    truncated_BG: Tensor
    prior_B2: Tensor
    policy_NT: Tensor
    behavior_NT: Tensor
    proximal_NT: Tensor
    reference_NT: Tensor
    mask_NT: Tensor

    @staticmethod
    def draw(seed: int, updates: int) -> "LaggedBatch":
        """Draw a batch at its last update. With one update, π is π_k."""
        rng = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        rewards_BG = torch.randint(0, 3, (B, G), generator=rng).double() / 2
        rewards_BG[0], rewards_BG[1] = 0.0, 1.0
        truncated_BG = torch.rand(B, G, generator=rng) < 0.2
        truncated_BG[2, 0] = True
        lengths_N = torch.randint(2, T + 1, (B * G,), generator=rng)
        mask_NT = torch.arange(T) < lengths_N[:, None]
        # Narrow bands need completions that hardly drift; wide ones need some that drift far.
        spread_N1 = torch.tensor([1e-3, 0.01, 0.3, 0.6], dtype=torch.float64).repeat(B)[:, None]
        drift_NT = spread_N1 * noise(B * G, T)
        # In every other group a completion's drift adds up to 0: its tokens move, its geometric mean does not.
        mean_N1 = torch.where(mask_NT, drift_NT, 0.0).sum(-1, keepdim=True) / lengths_N[:, None]
        drift_NT -= mean_N1 * (torch.arange(B * G) // G % 2)[:, None]
        behavior_NT = -2 + 0.5 * noise(B * G, T)
        proximal_NT = behavior_NT + drift_NT
        policy_NT = proximal_NT + (spread_N1 * noise(B * G, T) if updates > 1 else 0)
        prior_B2 = 1 + 4 * torch.rand(B, 2, generator=rng, dtype=torch.float64)
        reference_NT = policy_NT + 0.3 * noise(B * G, T)
        return LaggedBatch(
            rewards_BG, truncated_BG, prior_B2, policy_NT, behavior_NT, proximal_NT, reference_NT, mask_NT
        )

    def gradient(self, objective: Objective) -> Tensor:
        """Return the gradient of the loss with respect to the policy's log-probs, [N, T]."""
        credit = assign_credit(
            objective,
            self.rewards_BG,
            torch.ones_like(self.truncated_BG),
            self.mask_NT.sum(-1).view(B, G),
            group_seeds=range(B),
            prior_B2=self.prior_B2,
            truncated_BG=self.truncated_BG,
        )
        advantages_N, weights_N, mask_NT = credit.rows(self.mask_NT)
        gate_NT = None
        if objective.needs_first_look:
            ratios_NT = log_ratios(self.policy_NT, self.behavior_NT, mask_NT)
            gate_NT = gate_batch(objective, ratios_NT, advantages_N, mask_NT, group_size=G)
        policy_NT = self.policy_NT.clone().requires_grad_()
        others = (self.behavior_NT, self.proximal_NT, self.reference_NT)
        streams = Streams(policy_NT, *others, advantages_N, weights_N, mask_NT)
        loss = policy_loss(objective, streams, counts(mask_NT), length_limit=T, gate_NT=gate_NT).total
        return torch.autograd.grad(loss, policy_NT)[0]


def resolved(settings: dict[str, Any], updates: int) -> Objective | None:
    """Return the objective of a configuration, or None if `parse` refuses it."""
    try:
        return parse({"updates_per_batch": updates, "objective": settings}).objective.resolve()
    except ConfigError:
        return None


def outcome(preset: str, change: Change, updates: int, batches: int) -> str:
    """Return 'refused', 'changes the gradient', or 'inert' if no batch shows an effect."""
    if (changed := resolved(change.settings(preset), updates)) is None:
        return "refused"
    plain = resolved(change.without(preset), updates)
    assert plain is not None, f"{preset} is refused without {change.knob}"
    for seed in range(batches):
        batch = LaggedBatch.draw(seed, updates)
        before, after = batch.gradient(plain), batch.gradient(changed)
        if float((after - before).norm()) > 1e-9 * float(before.norm()):
            return "changes the gradient"
    return "inert"


def pairs(batches: int) -> Iterator[tuple[str, Change, int, str]]:
    """Yield the outcome of every preset, change and number of updates."""
    for preset in PRESETS:
        for change in CHANGES:
            for updates in (1, 2):
                yield preset, change, updates, outcome(preset, change, updates, batches)


def gradient_error(preset: str, seed: int) -> float:
    """Return the relative difference of our gradient and autograd on the published formula, on a random batch."""
    sys.path.insert(0, str(ROOT / "tests" / "objective"))
    naive, batches = import_module("naive"), import_module("batches")
    sys.path.pop(0)
    objective = PRESETS[preset].objective
    case = naive.Case.random(seed, 1 + seed % 4, 2 + seed % 5)
    reference = naive.naive_loss(preset, case)
    if reference.requires_grad:
        reference.backward()
    batch = batches.Batch.of(objective, case)
    batch.loss(objective).backward()
    expected = torch.zeros_like(batch.policy)
    for row, values in zip(expected, (one for group in case.policy for one in group), strict=True):
        if values.grad is not None:
            row[: len(values)] = values.grad
    difference, norm = float((batch.policy.grad - expected).norm()), float(expected.norm())
    return difference / norm if norm > 1e-12 else difference


def knob_figure(batches: int) -> Figure:
    """Count the pairs of preset and setting that are refused or change the gradient."""
    found = [*pairs(batches)]
    inert = [f"{preset}, {change.knob}, i = {updates}" for preset, change, updates, what in found if what == "inert"]
    refused = sum(what == "refused" for *_, what in found)
    total = len(found)
    return Figure(
        "promises.6.knobs",
        "pairs of preset and setting of [objective], with i = 1 and i = 2, that change the gradient or are refused",
        "every knob changes the loss or is refused",
        f"{total - len(inert)} of {total}",
        "pairs",
        not inert,
        total,
        "; ".join(inert) or f"{refused} are refused, {total - refused} change the gradient",
    )


def gradient_figures(batches: int) -> list[Figure]:
    """Measure the largest error of the new presets and of all presets."""
    errors = {preset: max(gradient_error(preset, seed) for seed in range(batches)) for preset in PRESETS}
    figures = []
    for name, which, presets in (("new", "the new presets", NEW), ("all", "all presets", tuple(PRESETS))):
        worst = max(presets, key=lambda preset: errors[preset])
        figures.append(
            Figure(
                f"promises.7.{name}",
                f"largest relative error of the gradient of {which} against float64 autograd on the published formula",
                f"≤ {TOLERANCE:g}",
                float(f"{errors[worst]:.2g}"),
                "",
                errors[worst] <= TOLERANCE,
                len(presets) * batches,
                f"{len(presets)} presets, {batches} random batches each; the largest is of {worst}",
            )
        )
    return figures


def main(short: bool) -> bool:
    batches = 20 if short else 250
    return report(short, knob_figure(1 if short else 5), *gradient_figures(batches))


if __name__ == "__main__":
    arguments = command_parser(__doc__, short="a few batches of each; record nothing").parse_args()
    sys.exit(not main(arguments.short))
