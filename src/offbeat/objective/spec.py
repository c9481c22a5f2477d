"""An objective as a value: one choice on each of a few independent axes. No torch.

The loss of every objective is, over completions and their tokens,

    L = - aggregate[ gate · weight · correction · A · log π ] + regularizers

where everything but log π is constant. A published algorithm is one entry of `presets.py`.

Advantage, gate and weight may be pure functions of your own:

    advantage(rewards_BG, scored_BG) -> advantages_BG   once per batch, float64; False in scored_BG: no score
    gate(ratios_NT, advantages_N1)   -> passes_NT       bool; N are some of the batch: decide each one by itself
    weight(ratios_NT, advantages_N1) -> weights_NT      the same; the ratios are those of `ratio` and `against`
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, cast

from offbeat.errors import OwnPartError
from offbeat.imports import describe_error, load_own

if TYPE_CHECKING:
    from torch import Tensor

TensorFunction = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class OwnFunction:
    """An advantage, gate or weight of your own, by its reference: `file.py:name` or `module:name`.

    It is loaded when it is called first, in the process that trains.
    """

    target: str

    def __call__(self, first: "Tensor", second: "Tensor") -> "Tensor":
        function = cast("TensorFunction", load_own(self.target))
        try:
            return function(first, second)
        except OwnPartError:
            raise
        except Exception as error:  # the function is yours, and may raise anything
            raised = describe_error(error, self.target.rpartition(":")[0])
            raise OwnPartError(f"{self.target} failed: {raised}; fix the file") from error


class Advantage(StrEnum):
    """How the rewards of a group become advantages; the formulas are in `credit.py`."""

    CENTRED = "centred"
    WHITENED = "whitened"
    STD_POPULATION = "std-population"
    STD_SAMPLE = "std-sample"
    LEAVE_ONE_OUT = "leave-one-out"
    SHRUNK = "shrunk"
    REWARD = "reward"


class Level(StrEnum):
    """The unit over which a ratio of two policies is taken."""

    TOKEN = "token"
    """π(y_t)/α(y_t)"""
    SEQUENCE = "sequence"
    """The product over the completion."""
    GEOMETRIC = "geometric"
    """The T-th root of that product: the geometric mean over the completion."""


class Against(StrEnum):
    """The denominator of the ratio that gate and weight use."""

    BEHAVIOR = "behavior"
    PROXIMAL = "proximal"


@dataclass(frozen=True)
class NoGate:
    """Every token passes."""


@dataclass(frozen=True)
class OneSide:
    """Stops a token only when the update would push its ratio further out: PPO's clip."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class TwoSide:
    """Stops every token whose ratio is outside [1 - low, 1 + high], for any advantage."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class Ring:
    """`TwoSide`, but a token far outside the band passes if the update brings it back."""

    low: float = 0.2
    high: float = 0.2
    outer_low: float = 0.6
    outer_high: float = 2.0


@dataclass(frozen=True)
class CentredBand:
    """A band of ± `width` around π_k/α instead of around 1, both at the objective's `ratio` level.

    It cannot bind on the first update of a batch.
    """

    width: float = 0.2


@dataclass(frozen=True)
class SecondMoment:
    """M2PO: of the tokens that the update pushes further out, stops the furthest, over the whole batch.

    The tokens that are left of these have a mean (log ratio)² of at most `limit`.
    """

    limit: float = 0.04


Gate = NoGate | OneSide | TwoSide | Ring | CentredBand | SecondMoment | TensorFunction


@dataclass(frozen=True)
class One:
    """No importance sampling."""


@dataclass(frozen=True)
class Importance:
    """The ratio itself, limited to `cap`."""

    cap: float = inf


@dataclass(frozen=True)
class Tapered:
    """1 for A ≥ 0, min(ratio, 1) for A < 0: bad answers fade out as the policy moves away from them."""


Weight = One | Importance | Tapered | TensorFunction


@dataclass(frozen=True)
class Truncate:
    """An extra factor min(π_k/α, cap), which corrects from the behavior to the proximal policy."""

    cap: float = inf
    level: Level = Level.TOKEN


@dataclass(frozen=True)
class Reject:
    """Stops data with π_k/α outside [low, high]: it no longer resembles the trainer's policy."""

    low: float
    high: float
    level: Level = Level.SEQUENCE


@dataclass(frozen=True)
class GroupESS:
    """Stops a whole group if its sequence ratios have an effective sample size below `least`, as a share of the group.

    The share is (Σρ)²/(n·Σρ²): 1 if all n completions count equally, 1/n if one outweighs the others.
    """

    least: float = 0.5


class KLEstimator(StrEnum):
    """Per-token estimators of KL(π ‖ π_ref), with d = log π - log π_ref."""

    K1 = "k1"
    """d. Unbiased in value; its gradient has mean zero on-policy, so as a penalty it has no effect."""
    K2 = "k2"
    """d²/2. Biased in value; weighted by the ratio, its gradient is that of the KL."""
    K3 = "k3"
    """exp(-d) + d - 1. Unbiased in value and never negative; its gradient is that of KL(π_ref ‖ π)."""


@dataclass(frozen=True)
class KL:
    """coefficient · KL(π ‖ π_ref). On samples of α it is biased unless it is `weighted` by the token ratio."""

    coefficient: float
    estimator: KLEstimator = KLEstimator.K3
    weighted: bool = False


@dataclass(frozen=True)
class SquaredLogRatio:
    """(tau/2)(log π/α)². The published form uses the sum over the completion; per token is a variant."""

    tau: float
    level: Level = Level.SEQUENCE


Regularizer = KL | SquaredLogRatio


@dataclass(frozen=True)
class ExpWeight:
    """RED-Weight: a completion counts exp(A/T) times, with the exponent limited to `cap`.

    With `adaptive`, T is chosen per batch so that the token-weighted push is balanced if it would be negative.
    """

    temperature: float = 1.0
    cap: float = 10.0
    adaptive: bool = False
    lowest: float = 0.8
    """The smallest T that `adaptive` may choose."""
    highest: float = 100.0


class Aggregate(StrEnum):
    """How token terms become one number. Counts are always over the whole batch."""

    TOKEN_MEAN = "token-mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence-mean-token-mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence-mean-token-sum"
    CONSTANT = "constant"
    """Sum over tokens / (completions · length limit)."""


class CutOff(StrEnum):
    """What happens to a completion that was cut off at the length limit."""

    SCORE = "score"
    """Its score counts like any other."""
    MASK = "mask"
    """It is left out of baseline, loss and counts, like an unscorable one."""


class Need(StrEnum):
    """A stream of log-probs that an objective requires."""

    BEHAVIOR = "behavior"
    PROXIMAL = "proximal"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Objective:
    """An objective: one choice on each axis.

    >>> grpo_without_importance_sampling = Objective(Advantage.STD_SAMPLE, gate=OneSide())
    >>> sorted(grpo_without_importance_sampling.needs)
    [<Need.BEHAVIOR: 'behavior'>]
    """

    advantage: Advantage | TensorFunction = Advantage.CENTRED
    epsilon: float = 1e-4
    """Keeps the division by a deviation finite. The value of Mroueh et al. 2025 and of TRL."""
    baseline_shift: float = 0.0
    """Subtracted from the baseline, so that every answer is imitated a little more (β of AsymRE)."""
    truncated: CutOff = CutOff.SCORE
    drop_surplus: bool = False
    """RED-Drop: leave out the answers below the mean that outnumber the others."""
    exp_weight: ExpWeight | None = None
    zero_variance_mask: bool = False
    """Leave groups of equal rewards out of loss, regularizers and counts."""
    ratio: Level = Level.TOKEN
    against: Against = Against.BEHAVIOR
    gate: Gate = NoGate()
    weight: Weight = One()
    correction: Truncate | None = None
    reject: Reject | GroupESS | None = None
    regularizers: tuple[Regularizer, ...] = ()
    aggregate: Aggregate = Aggregate.TOKEN_MEAN

    def __post_init__(self) -> None:
        if isinstance(self.gate, CentredBand) and self.against is Against.PROXIMAL:
            raise ValueError("a centered band is centered on π_k/α, so its ratio is π/α: use Against.BEHAVIOR")

    @property
    def needs_first_look(self) -> bool:
        """True if a gate compares ratios over the whole batch: `gates.gate_batch` decides before the backward pass."""
        return isinstance(self.gate, SecondMoment) or isinstance(self.reject, GroupESS)

    @property
    def needs(self) -> frozenset[Need]:
        """The log-prob streams that its formula contains."""
        needs: set[Need] = set()
        if not (isinstance(self.gate, NoGate) and isinstance(self.weight, One)) or self.needs_first_look:
            needs.add(Need(self.against.value))
        if isinstance(self.gate, CentredBand) or self.correction or isinstance(self.reject, Reject):
            needs |= {Need.BEHAVIOR, Need.PROXIMAL}
        for term in self.regularizers:
            if isinstance(term, KL):
                needs.add(Need.REFERENCE)
            if isinstance(term, SquaredLogRatio) or term.weighted:
                needs.add(Need.BEHAVIOR)
        return frozenset(needs)
