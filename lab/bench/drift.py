"""Simulate the drift cadence: how often it publishes without need, and how often it misses a need.

    python -m lab.bench.drift            half a minute; writes rows promises.2.*
    python -m lab.bench.drift --short    fewer batches; records nothing

A behavior policy and a policy that has moved away from it are given as tables, so their total variation is known
exactly. Batches of tokens are sampled from the behavior policy; the estimator and the cadence are the real ones.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lab.figures import Figure, command_parser, report
from offbeat.objective.bound import shortfall
from offbeat.objective.spec import Objective
from offbeat.run.cadence import Drift, PublishReason, StepEvidence
from offbeat.trainer.batch import ForwardPass, assemble_batch, build_micro_batch, plan_micro_batches, to_tensors
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.measures import measure
from offbeat.types import Completion, Group, Prompt, PublishedDrift, Score, StepContext, VersionSpan

BATCHES = 20_000
TOKENS = 384
BUDGET = 0.05
CALM, FAR = 0.033, 0.08


@dataclass(frozen=True)
class Policies:
    """Contexts with their tokens, flattened: the probability of each pair under α, and its ratio π/α."""

    probabilities: NDArray[np.float64]
    log_ratios: NDArray[np.float64]

    @property
    def total_variation(self) -> float:
        return float((self.probabilities * np.maximum(0, 1 - np.exp(self.log_ratios))).sum())

    def sample(self, rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
        edges = np.cumsum(self.probabilities)
        found = np.searchsorted(edges / edges[-1], rng.random(shape))
        return torch.from_numpy(self.log_ratios[np.minimum(found, len(edges) - 1)])


def policies(total_variation: float, *, vanishing: bool = False) -> Policies:
    """Return policies of this total variation: in a third of the contexts, training has moved mass between two tokens.

    A likely token (0.3) loses mass to a rare one (0.01), which becomes about ten times as likely: ratios have a long
    tail, because a token that is sampled once in three hundred tries decides. With `vanishing`, the likely token loses
    all of its mass instead, in fewer contexts: (1 - ρ)₊ is then 0 or 1, the noisiest case there is.
    """
    likely, rare = 0.3, 0.01
    moved = likely if vanishing else 3 * total_variation
    contexts = total_variation / moved
    alpha = np.array([likely, rare, 1 - likely - rare])
    pi = np.array([likely - moved, rare + moved, 1 - likely - rare])
    probabilities = np.concatenate([contexts * alpha, (1 - contexts) * alpha])
    return Policies(probabilities, np.log(np.concatenate([np.maximum(pi / alpha, 1e-9), np.ones(3)])))


def decisions(found: Policies, batches: int, half_l1: bool = False) -> NDArray[np.bool_]:
    """Return for each simulated batch whether the cadence publishes."""
    rng, rule, due = np.random.default_rng(3), Drift(BUDGET, 1, 1000), []
    for _ in range(0, batches, 1000):
        log_ratios = found.sample(rng, (1000, TOKENS))
        values = (log_ratios.exp() - 1).abs() / 2 if half_l1 else shortfall(log_ratios)
        for tv in values.mean(-1).tolist():
            why = rule.due([StepEvidence(PublishedDrift(TOKENS, tv))], publish_seconds=0.0)
            due.append(why is PublishReason.DRIFT)
    return np.array(due)


def false_publishes(batches: int) -> Figure:
    """Row promises.2.false."""
    found = policies(CALM)
    share = decisions(found, batches).mean()
    before = decisions(found, batches, half_l1=True).mean()
    worst = decisions(policies(CALM, vanishing=True), batches).mean()
    return Figure(
        "promises.2.false",
        f"batches that publish at a true TV of {CALM}, budget {BUDGET}, {TOKENS} tokens",
        "≤ 0.1 %",
        round(100 * float(share), 3),
        "%",
        bool(share <= 0.001),
        batches,
        f"true TV {found.total_variation:.4f}; with the estimator ½|ρ - 1| instead of (1 - ρ)₊ {100 * before:.2f} %; "
        f"if the drift consists of tokens that vanish altogether, the noisiest case, {100 * worst:.2f} %",
    )


def missed_publishes(batches: int) -> Figure:
    """Row promises.2.missed."""
    found = policies(FAR)
    due = decisions(found, 2 * batches).reshape(-1, 2)
    missed = float((~due.any(-1)).mean())
    noisiest = decisions(policies(FAR, vanishing=True), 2 * batches).reshape(-1, 2)
    worst = float((~noisiest.any(-1)).mean())
    return Figure(
        "promises.2.missed",
        f"pairs of batches that do not publish at a true TV of {FAR}, budget {BUDGET}, {TOKENS} tokens",
        "≤ 1 %",
        round(100 * missed, 3),
        "%",
        missed <= 0.01,
        batches,
        f"true TV {found.total_variation:.4f}; {100 * (~due[:, 0]).mean():.2f} % of first batches do not publish; "
        f"in the noisiest case {100 * worst:.2f} % of pairs",
    )


def mixed_batches(batches: int) -> list[Figure]:
    """Rows promises.2.imported and promises.2.replayed."""
    figures = []
    for kind, version in (("imported", None), ("replayed", 8)):
        rng, worst, before = np.random.default_rng(5), 0.0, 0.0
        for _ in range(batches):
            fresh = [_group(f"f{i}", 8) for i in range(4)]
            others = [_group(f"o{i}", version) for i in range(4)]
            replayed = frozenset(one.id for one in others) if kind == "replayed" else frozenset()
            policy = -1 + 0.3 * rng.standard_normal((64, 6))
            policy[32:] += 0.5 * rng.standard_normal((32, 6))
            alone, whole = _measured(fresh, policy[:32], frozenset()), _measured([*fresh, *others], policy, replayed)
            worst = max(worst, abs(alone[0].tv - whole[0].tv), float(alone[0].tokens != whole[0].tokens))
            before = max(before, abs(alone[0].tv - whole[1]))
        figures.append(
            Figure(
                f"promises.2.{kind}",
                f"largest difference of drift between a batch that is half {kind} and its fresh half",
                "≤ 1e-12",
                float(f"{worst:.2g}"),
                "",
                worst <= 1e-12,
                batches,
                f"over all tokens of the batch it would be up to {before:.3f} off",
            )
        )
    return figures


def _group(name: str, version: int | None) -> Group:
    spans = () if version is None else (VersionSpan(version, 0, 6),)
    answers = (
        Completion(f"{name}/{i}", np.full(6, 3), np.full(6, -1.0, np.float32), spans, score=Score(float(i % 2)))
        for i in range(8)
    )
    return Group(name, Prompt("p", np.array([1]), "t"), tuple(answers))


def _measured(
    groups: list[Group], policy: NDArray[np.float64], replayed: frozenset[str]
) -> tuple[PublishedDrift, float]:
    """Return the measured drift, and the drift over all tokens, if the policy's log-probs are `policy`."""
    batch = assemble_batch(groups, Objective(), step=10, context=StepContext(published=8, replayed=replayed))
    [plan] = plan_micro_batches(batch.trimmed, 10_000, shared_prefix=False)
    part = to_tensors(batch, build_micro_batch(plan, batch.trimmed), counted=True, device=torch.device("cpu"))
    order = [group * 8 + one for group, one in plan.completions]
    logprobs = torch.from_numpy(policy[order]).float()
    part.passes.append(ForwardPass(logprobs, torch.zeros_like(logprobs), part.mask_NT))
    found = measure(batch, [part], gated=False, ranks=Ranks())
    return found.published, found.overall["drift_tv_token"]


def main(short: bool) -> bool:
    batches = 2000 if short else BATCHES
    rows = [false_publishes(batches), missed_publishes(batches), *mixed_batches(20 if short else 200)]
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main(command_parser(__doc__, short="2,000 batches; record nothing").parse_args().short))
