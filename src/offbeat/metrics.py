"""Every metric, declared once: what it is called, how it is computed and reduced, and what it tells. No torch.

`offbeat explain NAME` and the docs read this registry; a part that emits a name not in it is refused.
"""

from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How values of micro-batches, ranks or groups become one."""

    TOKEN_MEAN = "mean over tokens of the batch"
    COMPLETION_MEAN = "mean over completions of the batch"
    GROUP_MEAN = "mean over groups of the batch"
    SHARE = "count over count"
    MAX = "largest of the batch"
    SUM = "sum over the batch"
    STEP = "one value a step"


@dataclass(frozen=True)
class Metric:
    """One line of a curve.

    >>> METRICS["ess"].low
    'a few samples speak for all: shorten the lag or gate harder'
    """

    name: str
    formula: str
    reduction: Reduction
    meaning: str
    high: str
    low: str


_ALL = (
    Metric(
        "reward_mean",
        "mean r over scored completions",
        Reduction.COMPLETION_MEAN,
        "what the behavior policy earned on this batch, not what the policy earns now",
        "the task is being solved",
        "the task is hard for this policy, or the verifier is broken: look at groups",
    ),
    Metric(
        "lag",
        "k - version, per token, when the group is trained on",
        Reduction.TOKEN_MEAN,
        "how many steps the trainer has moved since the tokens were sampled",
        "syncs are rare or queues long",
        "data is fresh",
    ),
    Metric(
        "zero_variance_share",
        "groups with Var r = 0 / groups",
        Reduction.SHARE,
        "groups without contrast: nothing to learn from them but the KL term",
        "prompts too easy or too hard: change the difficulty, or enlarge groups",
        "most prompts teach something",
    ),
    Metric(
        "gate_stopped_up",
        "tokens with A > 0 stopped by the gate / tokens with A > 0",
        Reduction.SHARE,
        "how often the gate refused to raise a token further",
        "the policy has run ahead of its data: sync sooner, lower the learning rate, or widen the clip",
        "the gate hardly binds; at lag 0 with one update a batch it cannot",
    ),
    Metric(
        "gate_stopped_down",
        "tokens with A < 0 stopped by the gate / tokens with A < 0",
        Reduction.SHARE,
        "how often the gate refused to lower a token further",
        "the policy has run ahead of its data: sync sooner, lower the learning rate, or widen the clip",
        "the gate hardly binds; at lag 0 with one update a batch it cannot",
    ),
    Metric(
        "drift_tv_token",
        "½ mean |π_k/α - 1|",
        Reduction.TOKEN_MEAN,
        "total variation from behavior to proximal policy, per token; the cadence looks at this",
        "the data is by another policy: sync",
        "lag is harmless so far",
    ),
    Metric(
        "drift_tv_sequence",
        "½ mean |π_k(y)/α(y) - 1|",
        Reduction.COMPLETION_MEAN,
        "the same over whole completions, as the bound has it; near 1 for long answers whatever happens",
        "the bound promises nothing",
        "the bound is meaningful",
    ),
    Metric(
        "drift_kl_token",
        "mean(π_k/α - 1 - log π_k/α)",
        Reduction.TOKEN_MEAN,
        "KL(α ‖ π_k) per token",
        "the data is by another policy: sync",
        "lag is harmless so far",
    ),
    Metric(
        "ratio_tail_share",
        "tokens with π_k/α above 10 or below 0.1 / tokens with known α",
        Reduction.SHARE,
        "tails of the ratio: tokens about which policy and data no longer agree at all",
        "single tokens have run away: look at the groups, sync sooner, or find the engine that computes another model",
        "ratios are close to 1",
    ),
    Metric(
        "ess",
        "(Σρ)²/(G Σρ²), ρ = π_k(y)/α(y)",
        Reduction.GROUP_MEAN,
        "effective share of a group's samples after importance weighting",
        "all samples count alike",
        "a few samples speak for all: shorten the lag or gate harder",
    ),
    Metric(
        "engine_gap",
        "mean |log α_engine - log π_trainer| at the same version",
        Reduction.TOKEN_MEAN,
        "inference engine against trainer on the same weights: arithmetic, not drift",
        "wrong weights, dtype or sampling parameters in the engine",
        "the engines agree",
    ),
    Metric(
        "entropy",
        "-Σ π log π at completion tokens",
        Reduction.TOKEN_MEAN,
        "how undecided the policy is",
        "it explores, or has come apart if it jumps",
        "it has made up its mind; collapse if it happens early",
    ),
    Metric(
        "predicted_gain",
        "mean over groups of mean ρ(r - r̄), ρ = π(y)/α(y)",
        Reduction.GROUP_MEAN,
        "J(π) - J(α) as the batch predicts it",
        "the update should pay off",
        "no improvement in sight on this data",
    ),
    Metric(
        "bound_paper",
        "L - 2((1-σ)/σ TV(π, α) + TV(π_k, α))",
        Reduction.GROUP_MEAN,
        "lower bound on J(π) - J(π_k), with the paper's constant",
        "improvement is guaranteed up to sampling error",
        "no guarantee; usual for long answers",
    ),
    Metric(
        "bound_tight",
        "L - ((1-σ)/σ TV(π, α) + TV(π_k, α))",
        Reduction.GROUP_MEAN,
        "the same with the constant 1, valid because TV is half the L1 distance",
        "improvement is guaranteed up to sampling error",
        "no guarantee; usual for long answers",
    ),
    Metric(
        "reference_kl",
        "mean(π_ref/π - 1 - log π_ref/π)",
        Reduction.TOKEN_MEAN,
        "KL(π ‖ π_ref) per token, on the behavior policy's samples",
        "the policy has left its reference: raise the KL coefficient, or refresh the reference",
        "it stays close, or the coefficient holds it there",
    ),
    Metric(
        "unscorable_share",
        "completions that could not be scored / completions of the batch",
        Reduction.SHARE,
        "answers that count neither as right nor as wrong",
        "the scorer is broken or too slow: look at their reasons",
        "scoring works",
    ),
    Metric(
        "too_small_share",
        "groups with fewer than two scored completions / groups",
        Reduction.SHARE,
        "groups with nothing to compare",
        "scoring fails: look at the unscorable completions",
        "feedback arrives",
    ),
    Metric(
        "trained_tokens",
        "completion tokens in the loss",
        Reduction.SUM,
        "what the step learned from",
        "long answers, or many groups with contrast",
        "few groups with contrast",
    ),
    Metric(
        "updates",
        "optimiser updates made on the batch",
        Reduction.STEP,
        "i, or fewer where the gate stopped every token before",
        "the batch was used as configured",
        "the gate ended the batch early: fewer updates per batch would do the same",
    ),
    Metric(
        "loss",
        "- aggregate[gate · weight · A · log π] + regularizers, of the last update",
        Reduction.STEP,
        "nothing by itself: only its gradient means something; two runs on the same data have the same",
        "look at reward, gates and drift instead",
        "look at reward, gates and drift instead",
    ),
    Metric(
        "grad_norm",
        "‖∇L‖₂ over all parameters, before clipping, of the last update",
        Reduction.STEP,
        "how strongly the batch pushes",
        "above the clip it is scaled down; a jump is worth a look at the batch",
        "little to learn from this batch",
    ),
    Metric(
        "learning_rate",
        "the schedule at this step",
        Reduction.STEP,
        "how far an update goes",
        "drift grows faster",
        "slow and safe",
    ),
    Metric(
        "pass@1",
        "mean over prompts of right answers / answers",
        Reduction.STEP,
        "what the policy earns now, on the same prompts each time; with a 95 % bootstrap interval over prompts",
        "the task is solved",
        "room to learn, or answers that the verifier cannot read: look at groups",
    ),
    Metric(
        "mean reward",
        "mean over prompts of mean r over scored answers",
        Reduction.STEP,
        "as pass@1, for rewards between right and wrong: what the policy earns now",
        "the task is solved",
        "room to learn, or answers that the verifier cannot read: look at groups",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
