"""An objective as a value: one choice on each of a few independent axes. No torch.

The loss of every objective is, over completions and their tokens,

    L = - aggregate[ gate · weight · correction · A · log π ] + regularizers

where everything but log π is held constant. A published algorithm is a line in `presets.py`.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Advantage(StrEnum):
    """How rewards of a group become advantages; formulas in `advantages.py`."""

    CENTRED = "centred"
    WHITENED = "whitened"
    STD_POPULATION = "std-population"
    STD_SAMPLE = "std-sample"
    LEAVE_ONE_OUT = "leave-one-out"
    SHRUNK = "shrunk"


class Level(StrEnum):
    """What a ratio of two policies is taken over."""

    TOKEN = "token"
    """π(y_t)/α(y_t)"""
    SEQUENCE = "sequence"
    """the product over the completion"""
    GEOMETRIC = "geometric"
    """the product's T-th root: the geometric mean over the completion"""


class Against(StrEnum):
    """The policy under the fraction line of the ratio that gate and weight look at."""

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
    """Stops every token outside 1 - low … 1 + high, whatever its advantage."""

    low: float = 0.2
    high: float = 0.2


@dataclass(frozen=True)
class Ring:
    """`TwoSide`, but far outside the band a token passes again when the update brings it back."""

    low: float = 0.2
    high: float = 0.2
    outer_low: float = 0.6
    outer_high: float = 2.0


@dataclass(frozen=True)
class CentredBand:
    """An additive band of `width` around π_k/α instead of around 1. Cannot bind on a batch's first update."""

    width: float = 0.2


Gate = NoGate | OneSide | TwoSide | Ring | CentredBand


@dataclass(frozen=True)
class One:
    """No importance sampling."""


@dataclass(frozen=True)
class Importance:
    """The ratio itself, cut off at `cap`."""

    cap: float = inf


@dataclass(frozen=True)
class Tapered:
    """1 for A ≥ 0, min(ratio, 1) for A < 0: bad answers fade as the policy leaves them."""


Weight = One | Importance | Tapered


@dataclass(frozen=True)
class Truncate:
    """An extra factor min(π_k/α, cap): from behavior to proximal policy."""

    cap: float = inf
    level: Level = Level.TOKEN


@dataclass(frozen=True)
class Reject:
    """Stops whatever has π_k/α outside low … high: what the trainer no longer recognises."""

    low: float
    high: float
    level: Level = Level.SEQUENCE


class KLEstimator(StrEnum):
    """Per-token estimates of KL(π ‖ π_ref); with d = log π - log π_ref:"""

    K1 = "k1"
    """d. Right in value; its gradient has mean zero on-policy, so as a penalty it does nothing."""
    K2 = "k2"
    """d²/2. Its gradient is the gradient of the KL, once weighted by the ratio."""
    K3 = "k3"
    """exp(-d) + d - 1. Right in value, never negative; its gradient is that of the other direction."""


@dataclass(frozen=True)
class KL:
    """coefficient · KL(π ‖ π_ref). On α's samples it is biased unless `weighted` by the token ratio."""

    coefficient: float
    estimator: KLEstimator = KLEstimator.K3
    weighted: bool = False


@dataclass(frozen=True)
class SquaredLogRatio:
    """(tau/2)(log π/α)²; by its authors' definition on the completion's sum, per token as a variant."""

    tau: float
    level: Level = Level.SEQUENCE


Regularizer = KL | SquaredLogRatio


@dataclass(frozen=True)
class ExpWeight:
    """RED-Weight: a completion counts exp(A/T) times, the exponent cut off at `cap`.

    With `adaptive`, T is found per batch so that the token-weighted push is balanced when it would be negative.
    """

    temperature: float = 1.0
    cap: float = 10.0
    adaptive: bool = False


class Aggregate(StrEnum):
    """How token terms become one number. Counts are always those of the whole batch."""

    TOKEN_MEAN = "token-mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence-mean-token-mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence-mean-token-sum"
    CONSTANT = "constant"
    """sum over tokens / (completions · the length limit)"""


class Need(StrEnum):
    """A stream of log-probs that an objective cannot do without."""

    BEHAVIOR = "behavior"
    PROXIMAL = "proximal"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Objective:
    """One choice per axis.

    >>> grpo_without_importance_sampling = Objective(Advantage.STD_SAMPLE, gate=OneSide())
    >>> sorted(grpo_without_importance_sampling.needs)
    [<Need.BEHAVIOR: 'behavior'>]
    """

    advantage: Advantage = Advantage.CENTRED
    baseline_shift: float = 0.0
    """Subtracted from the baseline: every answer is imitated this much besides (AsymRE's β)."""
    drop_surplus: bool = False
    """RED-Drop: leave out as many answers below the mean as outnumber the others."""
    exp_weight: ExpWeight | None = None
    zero_variance_mask: bool = False
    """Leave groups without any difference in reward out of loss, regularizers and counts."""
    ratio: Level = Level.TOKEN
    against: Against = Against.BEHAVIOR
    gate: Gate = NoGate()
    weight: Weight = One()
    correction: Truncate | None = None
    reject: Reject | None = None
    regularizers: tuple[Regularizer, ...] = ()
    aggregate: Aggregate = Aggregate.TOKEN_MEAN

    @property
    def needs(self) -> frozenset[Need]:
        """The streams its formula contains, read off the axes."""
        needs: set[Need] = set()
        if not (isinstance(self.gate, NoGate) and isinstance(self.weight, One)):
            needs.add(Need(self.against.value))
        if isinstance(self.gate, CentredBand) or self.correction or self.reject:
            needs |= {Need.BEHAVIOR, Need.PROXIMAL}
        for term in self.regularizers:
            if isinstance(term, KL):
                needs.add(Need.REFERENCE)
            if isinstance(term, SquaredLogRatio) or term.weighted:
                needs.add(Need.BEHAVIOR)
        return frozenset(needs)
