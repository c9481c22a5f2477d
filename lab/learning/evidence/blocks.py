"""The arms of each block of `lab/learning/protocol.md`, and the cells that it needs, in order."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.others import Use
from lab.learning.evidence.publishing import Follow
from lab.learning.evidence.rows import Done, EvidenceRow, Key, Measure, area, final, rows
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
    borrows: str = ""
    """Another block with some of these arms, whose cells count here too; it is to be finished first."""

    def done(self) -> dict[Key, EvidenceRow]:
        """Return the finished cells."""
        return (rows(self.borrows) if self.borrows else {}) | rows(self.name)

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


def fresh(names: Collection[str]) -> tuple[EvidenceArm, ...]:
    """Return the arms of block a at v = 1 of some objectives."""
    return tuple(arm for arm in OBJECTIVES if arm.name.removesuffix(" v1") in names)


REPLAY: Final[dict[str, Json]] = {"mode": "replay", "share": 0.5, "reuse_budget": 4}
REUSE: Final = (
    EvidenceArm("fresh 16"),
    EvidenceArm("fresh 8", {"prompts_per_step": 8}),
    EvidenceArm("fresh 8, i = 2", {"prompts_per_step": 8, "updates_per_batch": 2}),
    EvidenceArm("replay", {"sampler": {**REPLAY, "retire_drift": 0.99}}),
    EvidenceArm("replay retired by drift", {"sampler": REPLAY}),
)
REUSE_BLOCKS: Final = ("d-sums", "d-sorting")
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
CONDITION_RATES: Final = (2.5e-4, 5e-4, 1e-3)
PAPER_TUNING: Final = (101, 102)
P2_KL: Final[dict[str, Json]] = {"preset": "grpo-masked", "zero_variance_mask": False, "kl_coefficient": KL}
P2_FRESH: Final = (
    EvidenceArm("with KL", {"objective": P2_KL}),
    EvidenceArm("with KL and mask", {"objective": {**P2_KL, "zero_variance_mask": True}}),
    EvidenceArm("clipped, i = 1", {"objective": {"preset": "grpo-masked"}}),
    EvidenceArm("clipped, i = 10", {"objective": {"preset": "grpo-masked"}, "updates_per_batch": 10}),
)
"""At v = 1."""
P1_OBJECTIVES: Final[dict[str, dict[str, Json]]] = {
    "rec-oneside-nois": {"preset": "rec-oneside-nois"},
    "rec-oneside-is": {"preset": "rec-oneside-is"},
    "grpo": {"preset": "grpo"},
    "wide clip": {"preset": "rec-oneside-nois", "clip": [0.6, 2.0]},
    "reinforce": {"preset": "reinforce"},
}
P1_LAGS: Final[dict[str, dict[str, Json]]] = {"offset 10": {"every": 1, "offset": 10}, "offline": {"every": 100}}
"""(1, 10) of P1, and a run that never publishes: all of its groups are by the policy it begins with."""
P1: Final = (
    *(
        EvidenceArm(f"{name} {lag}", {"sync": sync, "objective": changes}, rates=CONDITION_RATES, tuning=PAPER_TUNING)
        for lag, sync in P1_LAGS.items()
        for name, changes in P1_OBJECTIVES.items()
    ),
    *(
        EvidenceArm(f"{name} at equal KL", {"objective": {"preset": name}}, rate=5e-4, keeps_kl=True)
        for name in ("grpo", "red-weight")
    ),
)
CONSTANTS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "opmd": ("tau", (0.3, 1.0)),
    "asymre": ("baseline_shift", (0.03, 0.3)),
    "red-weight": ("temperature", (0.3, 3.0)),
}
"""Objectives of block a that fail, with other values of τ, β and T than their preset's 0.1, 0.1 and 1."""
TUNED: Final = tuple(
    replace(arm, rates=(1.25e-4, 2.5e-4, 5e-4), tuning=PAPER_TUNING)
    for preset, (constant, values) in CONSTANTS.items()
    for value in values
    for arm in objective(preset, f"{preset} {constant} {value:g}", **{constant: value})[1:]
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


TRANSFER_RATES: Final = (2.5e-4, 1e-3)
TRANSFER_OBJECTIVES: Final[dict[str, dict[str, Json]]] = {
    "narrow": {"preset": "rec-oneside-nois"},
    "weighted": {"preset": "grpo-off-policy"},
    "wide": {"preset": "rec-oneside-nois", "clip": [0.6, 2.0]},
}


@dataclass(frozen=True)
class Setting:
    """What a run of block transfer is about."""

    digits: int
    rate: float
    objective: str
    v: int

    @property
    def arm(self) -> str:
        return f"{self.objective} {self.digits} digits v{self.v} at {self.rate:g}"

    @property
    def fresh(self) -> "Setting":
        """Its v = 1. There is nothing to stop at lag 0, so both bands have the same."""
        return replace(self, v=1, objective="narrow" if self.objective == "wide" else self.objective)


SETTINGS: Final = tuple(
    Setting(digits, rate, name, v)
    for digits in (2, 24, 8, 4, 16)
    for rate in TRANSFER_RATES
    for name in TRANSFER_OBJECTIVES
    for v in LAGS[1:]
)
TRANSFER: Final = tuple(
    EvidenceArm(
        one.arm,
        {"sync": {"every": one.v}, "objective": TRANSFER_OBJECTIVES[one.objective]},
        rate=one.rate,
        task=f"padded-{one.digits}",
        keeps_cosine=True,
    )
    for one in dict.fromkeys(both for lagged in SETTINGS for both in (lagged.fresh, lagged))
)
RULES: Final = (DRIFT, by_cost(1.0))
TIMING: Final = tuple(
    arm
    for rule in RULES
    for arm in (
        rule,
        *(replace(rule, name=f"{rule.name} {how}", follow=Follow(rule.name, how)) for how in ("shuffled", "even")),
    )
)
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
        Block("transfer", TRANSFER, seeds=3),
        Block("p2-sums", P2_FRESH, seeds=12, tuned_by=final),
        Block("p1-sums", (*fresh(P1_OBJECTIVES), *P1), seeds=8, tuned_by=final, borrows="a-sums"),
        Block("a-sums-tuned", (*fresh(CONSTANTS), *TUNED), seeds=8, tuned_by=final, borrows="a-sums"),
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
