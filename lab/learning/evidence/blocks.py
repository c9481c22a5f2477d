"""The arms of each block of `lab/learning/protocol.md`, and the cells that it needs, in order."""

from dataclasses import dataclass, replace
from typing import Final

from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.others import Use
from lab.learning.evidence.publishing import Follow
from lab.learning.evidence.rows import Done, Key, Measure, area, final
from offbeat.types import Json

LAGS: Final = (1, 5, 20)


@dataclass(frozen=True)
class Block:
    """Arms that are compared with each other on the same seeds."""

    name: str
    arms: tuple[EvidenceArm, ...]
    seeds: int
    """Reported seeds: 1, 2, 3 …"""
    task: str = "sums"
    tuned_by: Measure = area
    """Each arm has the learning rate with the highest mean of it over the tuning seeds."""

    def arm(self, name: str) -> EvidenceArm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def best_rate(self, arm: str, done: Done) -> float:
        """Return the learning rate of an arm that is tuned."""
        return self.arm(arm).best_rate(done, self.tuned_by)

    def ready(self, done: Done) -> list[Key]:
        """Return the missing cells that can be trained now: tuning, and after it seed by seed over all arms."""
        tuning = [key for arm in self.arms for key in arm.missing_tuning(done, self.tuned_by)]
        return tuning or [
            (arm.name, rate, seed)
            for seed in range(1, self.seeds + 1)
            for arm in self.arms
            if (arm.name, rate := arm.best_rate(done, self.tuned_by), seed) not in done
            and (arm.follow is None or (arm.follow.arm, rate, seed) in done)
        ]

    def count_missing(self, done: Done) -> int:
        """Return how many cells are not done; it may grow, because a grid of learning rates may be extended."""
        tuning = sum(len(arm.missing_tuning(done, self.tuned_by)) for arm in self.arms)
        rates = [None if tuning else arm.best_rate(done, self.tuned_by) for arm in self.arms]
        seeds = range(1, self.seeds + 1)
        return tuning + sum(
            rate is None or (arm.name, rate, seed) not in done
            for arm, rate in zip(self.arms, rates, strict=True)
            for seed in seeds
        )


def objective(preset: str, name: str = "", **changes: Json) -> tuple[EvidenceArm, ...]:
    """Return one arm for each lag of block a."""
    return tuple(
        EvidenceArm(
            f"{name or preset} v{v}",
            {"sync": {"every": v}, "objective": {"preset": preset, **changes}},
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
KL: Final = 0.04
"""β of the arms of block f that have a reference policy."""
P2: Final = tuple(
    EvidenceArm(
        name,
        {
            "sync": {"every": 10},
            "objective": {
                "preset": "grpo-off-policy", "zero_variance_mask": False, **changes,
            },
            **settings,
        },
    )
    for name, settings, changes in (
        ("plain", {}, {}),
        ("with mask", {}, {"zero_variance_mask": True}),
        ("with refill", {"sampler": {"refill": True}}, {}),
        ("with i = 10", {"updates_per_batch": 10}, {}),
        ("with KL", {}, {"kl_coefficient": KL}),
        ("with KL and refresh", {"reference": {"refresh_every": 20}}, {"kl_coefficient": KL}),
    )
)  # fmt: skip
P2_BASES: Final = {"with KL and refresh": "with KL"}
"""What an arm of block f is compared with, if not with the plain one."""

HIGH_RATE: Final = tuple(
    replace(arm, rate=1e-3) for name in ("rec-oneside-nois", "rec-oneside-is") for arm in objective(name)[-1:]
)
RARE: Final = tuple(objective(name)[0] for name in ("rec-oneside-nois", "red-weight", "red-drop"))
ALONE: Final = "fresh groups alone"
SUPERVISED: Final = "supervised training, then fresh groups"
OTHERS: Final = tuple(
    EvidenceArm(name, {"prompts_per_step": 4, "objective": {"preset": preset}}, use=use)
    for name, preset, use in (
        (ALONE, "rec-oneside-nois", None),
        ("with groups of another model, red-weight", "red-weight", Use.GROUPS),
        ("with groups of another model and log-probs", "rec-oneside-nois", Use.LOGPROBS),
        ("with answers of another model in our groups", "red-weight", Use.ONE_GROUP),
        (SUPERVISED, "rec-oneside-nois", Use.SUPERVISED),
    )
)
LONGEST: Final = 40
"""Steps without a publish that a rule allows."""
DRIFT: Final = EvidenceArm("drift", {"sync": {"every": LONGEST, "drift_budget": 0.05}}, keeps_publishes=True)


def by_cost(cost: float) -> EvidenceArm:
    """Return the arm that publishes by cost, if a publish costs as much as so many steps."""
    return EvidenceArm(f"cost {cost:g}", {"sync": {"every": None, "by_cost": True}}, cost=cost, keeps_publishes=True)


def fixed(v: int) -> EvidenceArm:
    """Return the arm that publishes every v steps."""
    return EvidenceArm(f"v{v}", {"sync": {"every": v}}, keeps_publishes=True)


RULES: Final = (DRIFT, by_cost(1.0))
TIMING: Final = tuple(
    arm
    for rule in RULES
    for arm in (
        rule,
        *(replace(rule, name=f"{rule.name} {how}", follow=Follow(rule.name, how)) for how in ("shuffled", "even")),
    )
)
CONDITION_RATES: Final = (2.5e-4, 5e-4, 1e-3)
FIXED_LAGS: Final = (1, 2, 5, 10, 20, 40)


def at_rate(arm: str, rate: float) -> str:
    """Return the name of an arm of block b in the condition with this learning rate."""
    return f"{arm} at {rate:g}"


CONDITIONS: Final = tuple(
    replace(arm, name=at_rate(arm.name, rate), rate=rate)
    for rate in CONDITION_RATES
    for arm in (*map(fixed, FIXED_LAGS), *RULES)
)
CONDITION_BLOCKS: Final = ("b-conditions", "b-conditions-8")
WALL_CLOCK: Final = (
    *map(fixed, (1, 2, 5, 10, 20)),
    DRIFT,
    *map(by_cost, (0.1, 1.0, 5.0)),
    replace(fixed(1), name="concurrent", settings={"sync": {"every": 1, "offset": 1}}),
)


def _with_prompts(arms: tuple[EvidenceArm, ...], prompts: int) -> tuple[EvidenceArm, ...]:
    return tuple(replace(arm, settings={**arm.settings, "prompts_per_step": prompts}) for arm in arms)


BLOCKS: Final = {
    block.name: block
    for block in (
        Block("d-sums", REUSE, seeds=20),
        Block("a-sums", OBJECTIVES, seeds=12, tuned_by=final),
        Block("a-sums-high-rate", HIGH_RATE, seeds=12),
        Block("a-rare-sums", RARE, seeds=12, task="rare-sums"),
        Block("g-sums", GROUP_SIZES, seeds=20, tuned_by=final),
        Block("f-sums", P2, seeds=12, tuned_by=final),
        Block("e-sums", OTHERS, seeds=20, tuned_by=final),
        Block("b-changing", TIMING, seeds=40, task="changing"),
        Block("b-conditions", CONDITIONS, seeds=4, task="changing"),
        Block("b-conditions-8", _with_prompts(CONDITIONS, 8), seeds=4, task="changing-8"),
        Block("c-sums", WALL_CLOCK, seeds=12),
        Block("d-sorting", REUSE, seeds=20, task="sorting"),
        Block("a-sorting", OBJECTIVES, seeds=12, task="sorting", tuned_by=final),
    )
}
"""In the order in which they are trained."""
