"""The one loss behind every objective: ratios, gates, aggregation over the batch, and regularizers.

    L = - aggregate[ gate · weight · correction · A · log π ] + regularizers

Gate, weight, correction and A are constants; the gradient flows through log π alone. With w = ρ and a one-side gate
that is exactly the gradient of PPO's min/clip. The VALUE of this loss means nothing: watch gates, ratios and drift.

The aggregate divides by `Counts` of the whole batch, so the losses of micro-batches and ranks add up to the loss of
one large batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.objective.credit import call_own
from offbeat.objective.spec import (
    KL,
    Aggregate,
    CentredBand,
    Gate,
    Importance,
    KLEstimator,
    Level,
    Need,
    NoGate,
    Objective,
    One,
    OneSide,
    Regularizer,
    Reject,
    Ring,
    SecondMoment,
    Tapered,
    TwoSide,
    Weight,
)
from offbeat.types import UNKNOWN, Unknown

LOG_RATIO_LIMIT = 20.0
"""exp(±20) ≈ 5e8 and 2e-9: larger ratios carry no more information, and products of two stay finite in float32."""


def log_ratios(numerator_NT: Tensor, denominator_NT: Tensor, mask_NT: Tensor, level: Level = Level.TOKEN) -> Tensor:
    """Return log(numerator/denominator) at `level`, [N, T]. Above token level, all tokens of a completion share it.

    Masked tokens get 0, even if their log-probs are NaN or infinite.

    >>> new, behavior = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    >>> mask = torch.tensor([[True, True]])
    >>> log_ratios(new, behavior, mask), log_ratios(new, behavior, mask, Level.GEOMETRIC)
    (tensor([[ 0.5000, -1.0000]]), tensor([[-0.2500, -0.2500]]))
    """
    if not numerator_NT.shape == denominator_NT.shape == mask_NT.shape or numerator_NT.ndim != 2:
        shapes = [tuple(x.shape) for x in (numerator_NT, denominator_NT, mask_NT)]
        raise ValueError(f"log-probs and mask must have the same shape [N, T], not {shapes}")
    dtype = torch.promote_types(numerator_NT.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=numerator_NT.device)
    # Mask before subtracting: -inf or NaN on a masked token must not reach the difference.
    token_NT = torch.where(mask_NT, numerator_NT.to(dtype), zero) - torch.where(mask_NT, denominator_NT.to(dtype), zero)
    if level is Level.TOKEN:
        return token_NT
    sequence_N1 = token_NT.sum(-1, keepdim=True)
    if level is Level.GEOMETRIC:
        sequence_N1 = sequence_N1 / mask_NT.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask_NT, sequence_N1, zero)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument clamped to ±`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def linear_exp(x: Tensor) -> Tensor:
    """exp up to `LOG_RATIO_LIMIT` and its tangent beyond: finite, and unlike a clamp with a gradient everywhere."""
    excess = (x - LOG_RATIO_LIMIT).clamp(min=0)
    return x.clamp(max=LOG_RATIO_LIMIT).exp() + math.exp(LOG_RATIO_LIMIT) * excess


def importance_weights(weight: Weight, ratios_NT: Tensor, advantages_N1: Tensor) -> Tensor:
    """Return the factor w of the objective, [N, T].

    >>> importance_weights(Importance(cap=2.0), torch.tensor([[0.5, 3.0]]), torch.tensor([[1.0]]))
    tensor([[0.5000, 2.0000]])
    """
    match weight:
        case One():
            return torch.ones_like(ratios_NT)
        case Importance(cap=cap):
            return ratios_NT.clamp(max=cap)
        case Tapered():
            return torch.where(advantages_N1 >= 0, 1.0, ratios_NT.clamp(max=1.0))
        case own:
            return call_own("weight", own, ratios_NT, advantages_N1)


def passes(gate: Gate, ratios_NT: Tensor, advantages_N1: Tensor, proximal_ratios_NT: Tensor | None = None) -> Tensor:
    """Return which tokens pass the gate, [N, T] bool. A `CentredBand` is centered on `proximal_ratios_NT` = π_k/α.

    A `SecondMoment` stops none here: `gates.gate_batch` does, because it compares the tokens of the whole batch.

    >>> ratios = torch.tensor([[0.7, 1.0, 1.3]])
    >>> passes(OneSide(0.2, 0.2), ratios, torch.tensor([[1.0]]))
    tensor([[ True,  True, False]])
    >>> passes(OneSide(0.2, 0.2), ratios, torch.tensor([[-1.0]]))
    tensor([[False,  True,  True]])
    """
    up, down = advantages_N1 >= 0, advantages_N1 <= 0
    match gate:
        case NoGate() | SecondMoment():
            return torch.ones_like(ratios_NT, dtype=torch.bool)
        case OneSide(low, high):
            return (up & (ratios_NT <= 1 + high)) | (down & (ratios_NT >= 1 - low))
        case TwoSide(low, high):
            return _within(ratios_NT, low, high)
        case Ring(low, high, outer_low, outer_high):
            comes_back = (up & (ratios_NT <= 1 - outer_low)) | (down & (ratios_NT >= 1 + outer_high))
            return _within(ratios_NT, low, high) | comes_back
        case CentredBand(width):
            if proximal_ratios_NT is None:
                raise ValueError("a centered band needs proximal_ratios_NT, the ratios π_k/α on which it is centered")
            above = ratios_NT <= proximal_ratios_NT + width
            below = ratios_NT >= (proximal_ratios_NT - width).clamp(min=0)
            return (up & above) | (down & below)
        case own:
            return call_own("gate", own, ratios_NT, advantages_N1, dtype=torch.bool)


def _within(ratios_NT: Tensor, low: float, high: float) -> Tensor:
    return (ratios_NT >= 1 - low) & (ratios_NT <= 1 + high)


@dataclass(frozen=True)
class Counts:
    """The divisor of the loss. Add the counts of all micro-batches and ranks before the first backward pass.

    >>> Counts(tokens=300, sequences=4) + Counts(tokens=100, sequences=4)
    Counts(tokens=400, sequences=8)
    """

    tokens: int
    sequences: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


def counts(mask_NT: Tensor) -> Counts:
    """Count the tokens under the mask, and the completions that have any."""
    return Counts(int(mask_NT.sum()), int(mask_NT.any(-1).sum()))


def aggregate(
    kind: Aggregate, values_NT: Tensor, mask_NT: Tensor, total: Counts, *, length_limit: int | None = None
) -> Tensor:
    """Return the share of these rows in the aggregate of the batch. `values_NT` must be 0 on masked tokens.

    >>> values, mask = torch.tensor([[1.0, 1.0, 1.0], [6.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    >>> [float(aggregate(kind, values, mask, counts(mask), length_limit=9)) for kind in Aggregate]
    [2.25, 3.5, 4.5, 0.5]
    """
    if kind is Aggregate.TOKEN_MEAN:
        return values_NT.sum() / max(total.tokens, 1)
    per_sequence = values_NT.sum(-1)
    if kind is Aggregate.SEQUENCE_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / mask_NT.sum(-1).clamp(min=1)
    if kind is Aggregate.CONSTANT:
        if length_limit is None:
            raise ValueError("aggregate 'constant' divides by the length limit: pass length_limit")
        per_sequence = per_sequence / length_limit
    return per_sequence.sum() / max(total.sequences, 1)


@dataclass(frozen=True)
class Streams:
    """Everything the loss reads, for any N completions. They need not form whole groups.

    Log-probs are [N, T]. A stream that was not recorded is `UNKNOWN`; an objective that needs it raises an error.
    """

    policy_NT: Tensor
    """Log-probs of the policy being trained; the gradient flows through these."""
    behavior_NT: Tensor | Unknown
    """Log-probs of the distribution that was really sampled from."""
    proximal_NT: Tensor | Unknown
    """Log-probs of the policy at the start of this batch; on the first update, `policy_NT.detach()`."""
    reference_NT: Tensor | Unknown
    advantages_N: Tensor
    weights_N: Tensor
    mask_NT: Tensor
    """True on the tokens to train on. All False leaves a completion out."""

    def __post_init__(self) -> None:
        shape = self.policy_NT.shape
        if len(shape) != 2:
            raise ValueError(f"policy_NT must be [N, T], not {tuple(shape)}")
        for name in ("behavior_NT", "proximal_NT", "reference_NT", "mask_NT"):
            stream = getattr(self, name)
            if stream is not UNKNOWN and stream.shape != shape:
                raise ValueError(f"{name} is {tuple(stream.shape)}, but policy_NT is {tuple(shape)}")
        for name in ("advantages_N", "weights_N"):
            if getattr(self, name).shape != shape[:1]:
                raise ValueError(f"{name} is {tuple(getattr(self, name).shape)}, but there are {shape[0]} completions")
        if self.mask_NT.dtype != torch.bool:
            raise ValueError(f"mask_NT must be bool, not {self.mask_NT.dtype}")

    def need(self, need: Need) -> Tensor:
        """Return a stream without gradient, or raise an error that names it if it is unknown."""
        stream: Tensor | Unknown = getattr(self, f"{need.value}_NT")
        if isinstance(stream, Unknown):
            raise ValueError(
                f"this objective needs {need.value} log-probs, and they are unknown here: "
                "record them, or choose an objective that does not need them (docs/reference/presets.md)"
            )
        return stream.detach()


@dataclass(frozen=True)
class Loss:
    """The loss on which to call backward, and which tokens entered it."""

    total: Tensor
    log_ratios_NT: Tensor | None
    """The log π/α or log π/π_k that the gate saw; None for an objective without ratios."""
    passed_NT: Tensor
    """Tokens that push the policy: unmasked, and stopped neither by the gate nor by rejection."""


def policy_loss(
    objective: Objective,
    streams: Streams,
    total: Counts,
    *,
    length_limit: int | None = None,
    gate_NT: Tensor | None = None,
) -> Loss:
    """Return the share of these completions in the batch's loss. `total` counts all micro-batches and ranks.

    An objective that `needs_first_look` also takes `gate_NT`, the rows of `gates.gate_batch` for these completions.

    >>> from offbeat.objective.presets import PRESETS
    >>> logprobs, mask = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    >>> streams = Streams(logprobs, logprobs.detach(), UNKNOWN, UNKNOWN, torch.tensor([1.0, -1.0]), torch.ones(2), mask)
    >>> policy_loss(PRESETS["grpo"].objective, streams, counts(mask)).total.backward()
    >>> logprobs.grad[:, 0]
    tensor([-0.1667,  0.1667])
    """
    mask_NT = streams.mask_NT
    _check_gate(objective, gate_NT, mask_NT)
    zero = torch.zeros((), dtype=streams.policy_NT.dtype, device=streams.policy_NT.device)
    policy_NT = torch.where(mask_NT, streams.policy_NT, zero)
    advantages_N1 = streams.advantages_N[:, None]

    coefficients_NT = (streams.weights_N * streams.advantages_N)[:, None].expand_as(policy_NT)
    passed_NT, log_ratios_NT = mask_NT, None
    if objective.needs & {Need.BEHAVIOR, Need.PROXIMAL}:
        log_ratios_NT, factor_NT, passing_NT = _gate_and_weight(objective, streams, advantages_N1)
        passed_NT = mask_NT & passing_NT
        coefficients_NT = coefficients_NT * factor_NT
    if gate_NT is not None:
        passed_NT = passed_NT & gate_NT
    terms_NT = torch.where(passed_NT, coefficients_NT.detach() * policy_NT, zero)
    loss = -aggregate(objective.aggregate, terms_NT, mask_NT, total, length_limit=length_limit)
    for regularizer in objective.regularizers:
        loss = loss + _penalty(regularizer, objective.aggregate, streams, total, length_limit)
    return Loss(loss, log_ratios_NT, passed_NT)


def _check_gate(objective: Objective, gate_NT: Tensor | None, mask_NT: Tensor) -> None:
    if objective.needs_first_look and gate_NT is None:
        raise ValueError(
            "this objective has a gate over the whole batch: pass gate_NT, which offbeat.objective.gates.gate_batch "
            "computes from the log-ratios of the whole batch, or choose an objective without one"
        )
    if gate_NT is None:
        return
    if not objective.needs_first_look:
        raise ValueError("this objective has no gate over the whole batch: leave gate_NT out")
    if gate_NT.shape != mask_NT.shape or gate_NT.dtype != torch.bool:
        raise ValueError(f"gate_NT must be bool {tuple(mask_NT.shape)}, not {gate_NT.dtype} {tuple(gate_NT.shape)}")


@torch.no_grad()
def _gate_and_weight(
    objective: Objective, streams: Streams, advantages_N1: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the log-ratios for the gate (None if unused), the factor weight · correction, and which tokens pass."""
    mask_NT = streams.mask_NT
    factor_NT = torch.ones_like(streams.policy_NT)
    passing_NT = torch.ones_like(mask_NT)
    seen_NT = center_NT = None
    if isinstance(objective.gate, CentredBand):
        center_NT = _proximal_ratios(streams, objective.ratio)
    if Need(objective.against.value) in objective.needs:
        against_NT = streams.need(Need(objective.against.value))
        seen_NT = log_ratios(streams.policy_NT, against_NT, mask_NT, objective.ratio)
        ratios_NT = bounded_exp(seen_NT)
        factor_NT = importance_weights(objective.weight, ratios_NT, advantages_N1)
        passing_NT = passes(objective.gate, ratios_NT, advantages_N1, center_NT)
    if objective.correction is not None:
        correction_NT = _proximal_ratios(streams, objective.correction.level)
        factor_NT = factor_NT * correction_NT.clamp(max=objective.correction.cap)
    if isinstance(reject := objective.reject, Reject):
        trust_NT = _proximal_ratios(streams, reject.level)
        passing_NT = passing_NT & (trust_NT >= reject.low) & (trust_NT <= reject.high)
    return seen_NT, factor_NT, passing_NT


def _proximal_ratios(streams: Streams, level: Level) -> Tensor:
    """π_k/α at the given level."""
    proximal_NT, behavior_NT = streams.need(Need.PROXIMAL), streams.need(Need.BEHAVIOR)
    return bounded_exp(log_ratios(proximal_NT, behavior_NT, streams.mask_NT, level))


def _penalty(
    regularizer: Regularizer, kind: Aggregate, streams: Streams, total: Counts, length_limit: int | None
) -> Tensor:
    mask_NT = streams.mask_NT
    if isinstance(regularizer, KL):
        difference_NT = log_ratios(streams.policy_NT, streams.need(Need.REFERENCE), mask_NT)
        values_NT = _kl(regularizer.estimator, difference_NT)
        if regularizer.weighted:
            behavior_NT = streams.need(Need.BEHAVIOR)
            values_NT = values_NT * bounded_exp(log_ratios(streams.policy_NT.detach(), behavior_NT, mask_NT))
        return regularizer.coefficient * aggregate(kind, values_NT, mask_NT, total, length_limit=length_limit)
    token_NT = log_ratios(streams.policy_NT, streams.need(Need.BEHAVIOR), mask_NT)
    if regularizer.level is Level.TOKEN:
        squares = aggregate(kind, token_NT.square(), mask_NT, total, length_limit=length_limit)
    else:
        squares = token_NT.sum(-1).square().sum() / max(total.sequences, 1)
    return regularizer.tau / 2 * squares


def _kl(estimator: KLEstimator, difference: Tensor) -> Tensor:
    match estimator:
        case KLEstimator.K1:
            return difference
        case KLEstimator.K2:
            return difference.square() / 2
        case KLEstimator.K3:
            # With a clamped exp only `+ difference` would have a gradient, and it points away from π_ref.
            return linear_exp(-difference) + difference - 1
