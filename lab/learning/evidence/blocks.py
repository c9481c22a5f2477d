"""The arms of each block of `lab/learning/protocol.md`, and the cells that it needs, in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from lab.learning.evidence.cells import EvidenceRow, area
from offbeat.types import Json

RATES: Final = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
TUNING: Final = (101, 102, 103, 104)
EXTENSIONS: Final = 2
"""How often the grid of learning rates is extended if the best one is at its edge."""
LAGS: Final = (1, 5, 20)

Settings = Mapping[str, Json | Mapping[str, Json]]
Key = tuple[str, float, int]
"""Arm, learning rate, seed."""
Done = Mapping[Key, EvidenceRow]


@dataclass(frozen=True)
class EvidenceArm:
    """One of the ways to train that a block compares."""

    name: str
    settings: Settings = field(default_factory=dict)
    """What it changes, as in a configuration file."""


@dataclass(frozen=True)
class Block:
    """Arms that are compared with each other on the same seeds."""

    name: str
    arms: tuple[EvidenceArm, ...]
    seeds: int
    """Reported seeds: 1, 2, 3 …"""
    task: str = "sums"

    def wanted(self, done: Done) -> Iterator[tuple[EvidenceArm, float, int]]:
        """Yield the cells of the block that are not done: all tuning first, then seed by seed over all arms.

        `done` grows while the caller trains what this yields.
        """
        for arm in self.arms:
            for rate in grid(arm.name, done):
                yield from ((arm, rate, seed) for seed in TUNING if (arm.name, rate, seed) not in done)
        for seed in range(1, self.seeds + 1):
            for arm in self.arms:
                key = (arm.name, best_rate(arm.name, done), seed)
                if key not in done:
                    yield arm, *key[1:]


def grid(arm: str, done: Done) -> Iterator[float]:
    """Yield the learning rates to tune, and, once these are tuned, one more while the best is at an edge."""
    yield from RATES
    rates = list(RATES)
    for _ in range(EXTENSIONS):
        best = _best(arm, rates, done)
        if min(rates) < best < max(rates):
            return
        rates.append(best / 2 if best == min(rates) else best * 2)
        yield rates[-1]


def best_rate(arm: str, done: Done) -> float:
    """Return the rate with the largest mean area over the tuning seeds."""
    return _best(arm, {rate for name, rate, _ in done if name == arm}, done)


def _best(arm: str, rates: "set[float] | list[float]", done: Done) -> float:
    def mean_area(rate: float) -> float:
        return sum(area(done[arm, rate, seed]) for seed in TUNING) / len(TUNING)

    return max((rate for rate in sorted(rates) if all((arm, rate, seed) in done for seed in TUNING)), key=mean_area)


def objective(preset: str, name: str = "", **changes: Json) -> tuple[EvidenceArm, ...]:
    """Return one arm for each lag of block a."""
    return tuple(
        EvidenceArm(
            f"{name or preset} v{v}",
            {"sync": {"every": v}, "objective": {"preset": preset, "untested_lag": True, **changes}},
        )
        for v in LAGS
    )


OBJECTIVES: Final = (
    *objective("rec-oneside-nois"),
    *objective("rec-oneside-is"),
    *objective("grpo"),
    *objective("rec-oneside-nois", "wide clip", clip=[0.6, 2.0]),
    *objective("grpo-off-policy"),
    *objective("grpo-off-policy", "grpo-off-policy capped", weight_cap=2.0),
    *objective("topr"),
    *objective("red-weight"),
    *objective("red-drop"),
    *objective("asymre"),
    *objective("opmd"),
    *objective("rec-ring"),
    *objective("cispo"),
    *objective("reinforce"),
)
REPLAY: Final[dict[str, Json]] = {"mode": "replay", "share": 0.5, "reuse_budget": 4}
REUSE: Final = (
    EvidenceArm("fresh 16"),
    EvidenceArm("fresh 8", {"prompts_per_step": 8}),
    EvidenceArm("fresh 8, i = 2", {"prompts_per_step": 8, "updates_per_batch": 2}),
    EvidenceArm("replay", {"sampler": {**REPLAY, "retire_drift": 0.99}}),
    EvidenceArm("replay retired by drift", {"sampler": REPLAY}),
)
GROUP_SIZES: Final = tuple(
    EvidenceArm(
        f"{advantage} G{size}",
        {"prompts_per_step": 128 // size, "group_size": size, "objective": {"advantage": advantage}},
    )
    for size in (2, 4, 8)
    for advantage in ("centred", "leave-one-out", "shrunk")
)
P2: Final = tuple(
    EvidenceArm(
        name,
        {
            "sync": {"every": 10},
            "objective": {"preset": "grpo-off-policy", "untested_lag": True, **changes},
            **settings,
        },
    )
    for name, settings, changes in (
        ("grpo-off-policy", {}, {}),
        ("with mask", {}, {"zero_variance_mask": True}),
        ("with refill", {"sampler": {"refill": True}}, {}),
        ("with i = 10", {"updates_per_batch": 10}, {}),
    )
)

BLOCKS: Final = {
    block.name: block
    for block in (
        Block("d-sums", REUSE, seeds=20),
        Block("a-sums", OBJECTIVES, seeds=12),
        Block("g-sums", GROUP_SIZES, seeds=20),
        Block("f-sums", P2, seeds=12),
    )
}
"""In the order in which they are trained."""
