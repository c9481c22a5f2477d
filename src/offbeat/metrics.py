"""Every metric, declared once: name, formula, reduction and meaning. No torch.

`offbeat explain NAME` and the docs read this registry, and a metric that is not in it cannot be written.
"""

from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How the values of micro-batches, ranks or groups become one value."""

    TOKEN_MEAN = "mean over tokens of the batch"
    COMPLETION_MEAN = "mean over completions of the batch"
    GROUP_MEAN = "mean over groups of the batch"
    SHARE = "count over count"
    SUM = "sum over the batch"
    STEP = "one value per step"


@dataclass(frozen=True)
class Metric:
    """One metric of a step, with what a high and a low value mean.

    >>> METRICS["ess"].low
    'a few samples dominate: reduce the lag or tighten the gate'
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
        "reward of the behavior policy on this batch, not of the current policy",
        "the policy solves the task",
        "the task is hard for this policy, or the verifier is broken: look at some groups",
    ),
    Metric(
        "lag",
        "k - version, per token, when the group is trained on",
        Reduction.TOKEN_MEAN,
        "how many steps the trainer has made since the tokens were sampled",
        "syncs are rare, or queues are long",
        "the data is fresh",
    ),
    Metric(
        "completion_length",
        "mean tokens over completions",
        Reduction.COMPLETION_MEAN,
        "tokens of a completion of this batch, the end token included",
        "answers grow: if reward does not grow with them, or truncated_share rises, penalize length",
        "answers shrink: if reward falls with them, look at some groups",
    ),
    Metric(
        "truncated_share",
        "completions that reached sampling.max_tokens / completions of the batch",
        Reduction.SHARE,
        "completions that were cut before they ended",
        "the policy cannot finish: raise sampling.max_tokens, or penalize length",
        "almost every answer ends by itself",
    ),
    Metric(
        "zero_variance_share",
        "groups with Var r = 0 / groups",
        Reduction.SHARE,
        "groups with equal rewards, from which only the KL term can learn",
        "prompts are too easy or too hard: change the difficulty, or use larger groups",
        "most prompts give a learning signal",
    ),
    Metric(
        "gate_stopped_up",
        "tokens with A > 0 stopped by the gate / tokens with A > 0",
        Reduction.SHARE,
        "how often the gate stopped the update from raising a token's probability further",
        "the policy has moved far from its data: sync more often, lower the learning rate, or widen the clip",
        "the gate hardly binds; at lag 0 with one update per batch it never does",
    ),
    Metric(
        "gate_stopped_down",
        "tokens with A < 0 stopped by the gate / tokens with A < 0",
        Reduction.SHARE,
        "how often the gate stopped the update from lowering a token's probability further",
        "the policy has moved far from its data: sync more often, lower the learning rate, or widen the clip",
        "the gate hardly binds; at lag 0 with one update per batch it never does",
    ),
    Metric(
        "gate_stopped_gradient",
        "Σ|A|(1 - π) over tokens stopped by the gate / Σ|A|(1 - π) over all tokens",
        Reduction.SHARE,
        "share of the batch's gradient that the gate stopped; 1 - π is the slope of log π in the token's logit, so "
        "tokens that are certain anyway do not hide what is lost",
        "much of the step is wasted: publish sooner, or replay less",
        "almost all of the batch moves the policy",
    ),
    Metric(
        "drift_published",
        "mean (1 - π_k/α)₊ over fresh tokens of the version published last",
        Reduction.TOKEN_MEAN,
        "total variation from the version that workers have; sync.drift_budget is compared with it",
        "the workers' policy is far from the trainer's: publish",
        "a publish would change little",
    ),
    Metric(
        "drift_tv_token",
        "mean (1 - π_k/α)₊ over all tokens with known α",
        Reduction.TOKEN_MEAN,
        "total variation between behavior and proximal policy, per token, replayed and imported tokens included",
        "the data comes from a very different policy: sync",
        "the lag does no harm so far",
    ),
    Metric(
        "drift_step",
        "mean (1 - π/π_k)₊ over tokens of some groups of the batch, π after all updates of the step",
        Reduction.TOKEN_MEAN,
        "total variation between the policies before and after the step, per token; NaN if weights or moments overflow",
        "one step replaces what the policy does: lower the learning rate",
        "steps are small",
    ),
    Metric(
        "drift_tv_sequence",
        "mean (1 - π_k(y)/α(y))₊",
        Reduction.COMPLETION_MEAN,
        "total variation over whole completions, as in the improvement bound; always near 1 for long answers",
        "the bound guarantees nothing",
        "the bound is meaningful",
    ),
    Metric(
        "drift_kl_token",
        "mean(π_k/α - 1 - log π_k/α)",
        Reduction.TOKEN_MEAN,
        "KL(α ‖ π_k) per token",
        "the data comes from a very different policy: sync",
        "the lag does no harm so far",
    ),
    Metric(
        "ratio_tail_share",
        "tokens with π_k/α above 10 or below 0.1 / tokens with known α",
        Reduction.SHARE,
        "tokens in the tails of the ratio, where policy and data disagree completely",
        "a few tokens have diverged: look at their groups, sync more often, or check engine_gap",
        "ratios are close to 1",
    ),
    Metric(
        "ess",
        "(Σρ)²/(G Σρ²), ρ = π_k(y)/α(y)",
        Reduction.GROUP_MEAN,
        "effective share of a group's samples after importance weighting",
        "all samples count about equally",
        "a few samples dominate: reduce the lag or tighten the gate",
    ),
    Metric(
        "engine_gap",
        "mean |log α_engine - log π_trainer| at the same version",
        Reduction.TOKEN_MEAN,
        "difference between inference engine and trainer on the same weights: numerical error, not drift",
        "the engine has wrong weights, a wrong dtype or wrong sampling parameters",
        "the engines agree",
    ),
    Metric(
        "entropy",
        "-Σ π log π at completion tokens",
        Reduction.TOKEN_MEAN,
        "how uncertain the policy is about the next token",
        "the policy explores; a sudden jump means that it is collapsing into noise",
        "the policy is certain; early in a run this is entropy collapse",
    ),
    Metric(
        "predicted_gain",
        "mean over all fresh groups of Σρr/Σρ - r̄, bias removed by the jackknife, ρ = π(y)/α(y)",
        Reduction.GROUP_MEAN,
        "estimate of J(π) - J(α) from this batch; no single ratio can dominate it",
        "the policy is better than the one that wrote the batch",
        "this data predicts no improvement",
    ),
    Metric(
        "predicted_gain_plain",
        "mean over all fresh groups of G/(G-1) mean ρ(r - r̄), ρ = π(y)/α(y)",
        Reduction.GROUP_MEAN,
        "the same estimate without dividing by Σρ: unbiased, and noisy, because ratios have long tails",
        "as for predicted_gain, or one large ratio",
        "this data predicts no improvement",
    ),
    Metric(
        "bound_paper",
        "L - 2((1-σ)/σ TV(π, α) + TV(π_k, α))",
        Reduction.GROUP_MEAN,
        "lower bound on J(π) - J(π_k), with the paper's constant; only with several updates per batch, because with "
        "one π = π_k and the bound is at most 0 in expectation",
        "improvement is guaranteed up to sampling error",
        "no guarantee, which is usual for long answers",
    ),
    Metric(
        "bound_tight",
        "L - ((1-σ)/σ TV(π, α) + TV(π_k, α))",
        Reduction.GROUP_MEAN,
        "bound_paper with the constant 1, which is valid because TV is half the L1 distance; only with several updates",
        "improvement is guaranteed up to sampling error",
        "no guarantee, which is usual for long answers",
    ),
    Metric(
        "reference_kl",
        "mean(π_ref/π - 1 - log π_ref/π)",
        Reduction.TOKEN_MEAN,
        "KL(π ‖ π_ref) per token, on samples of the behavior policy",
        "the policy is far from its reference: raise the KL coefficient, or refresh the reference",
        "the policy is close to its reference",
    ),
    Metric(
        "unscorable_share",
        "completions that could not be scored / completions generated since the step before; in a run that generates "
        "nothing, of the batch",
        Reduction.SHARE,
        "completions that count neither as right nor as wrong, counted before the sampler drops any",
        "the reward function or the sandbox is broken, or the machine too busy: look at the event `unscorable`",
        "scoring works",
    ),
    Metric(
        "answer_fault_share",
        "completions that made their own scoring fail / completions generated since the step before",
        Reduction.SHARE,
        "answers that take the grader too long, crash it or make it raise; they get the task's answer_fault",
        "the policy learns to avoid its grader, or the reward function does not expect such answers: look at some",
        "answers can be graded",
    ),
    Metric(
        "right_unscorable_share",
        "right answers that made their scoring fail / completions generated since the step before",
        Reduction.SHARE,
        "right answers on which the reward function fails; they are left out, and not counted as wrong",
        "the reward function has a bug on right answers, such as log(0): its error is in `offbeat view`",
        "right answers can be graded",
    ),
    Metric(
        "too_small_share",
        "groups with fewer than two scored completions / groups",
        Reduction.SHARE,
        "groups without two rewards to compare",
        "scoring fails often: look at the unscorable completions",
        "almost every group has its scores",
    ),
    Metric(
        "trained_tokens",
        "completion tokens in the loss",
        Reduction.SUM,
        "amount of data in the step",
        "long answers, or many groups with different rewards",
        "few groups with different rewards",
    ),
    Metric(
        "tokens_per_second",
        "trained_tokens / seconds since the step before",
        Reduction.STEP,
        "throughput of the whole run: waiting, publishing, evaluating and saving included",
        "the machine is used well",
        "look at the time by phase in the report: the largest one limits the run",
    ),
    Metric(
        "updates",
        "optimizer updates made on the batch",
        Reduction.STEP,
        "updates_per_batch, or fewer if the gate stops every token before",
        "the batch was used as configured",
        "the gate ended the batch early: fewer updates per batch would have the same effect",
    ),
    Metric(
        "loss",
        "- aggregate[gate · weight · A · log π] + regularizers, of the last update",
        Reduction.STEP,
        "nothing by itself, because only its gradient matters; equal in two runs on the same data",
        "look at reward, gates and drift instead",
        "look at reward, gates and drift instead",
    ),
    Metric(
        "grad_norm",
        "‖∇L‖₂ over all parameters, before clipping, of the last update",
        Reduction.STEP,
        "how strongly the batch pushes the policy",
        "above max_grad_norm it is scaled down; after a sudden jump, look at the batch",
        "this batch has little to teach",
    ),
    Metric(
        "learning_rate",
        "the schedule at this step",
        Reduction.STEP,
        "how far an update moves the policy",
        "drift grows faster",
        "slow and stable",
    ),
    Metric(
        "pass@1",
        "mean over prompts of right answers / answers",
        Reduction.STEP,
        "success rate of the current policy on the same held-out prompts each time, with a 95 % interval over prompts",
        "the policy solves the task",
        "the policy still fails, or the verifier cannot read its answers: look at some groups",
    ),
    Metric(
        "pass@k",
        "mean over prompts of 1 − C(n − c, k) / C(n, k), c of n answers right",
        Reduction.STEP,
        "chance that one of k = evaluation.samples answers is right",
        "the policy can solve the task",
        "if it falls while pass@1 rises, the policy loses variety: its answers to a prompt become alike",
    ),
    Metric(
        "greedy pass@1",
        "mean over prompts of the greedy answer being right",
        Reduction.STEP,
        "success rate without sampling, if evaluation.greedy is set",
        "the policy solves the task",
        "if pass@1 is higher, the most probable answer is not the best one",
    ),
    Metric(
        "mean reward",
        "mean over prompts of mean r over scored answers",
        Reduction.STEP,
        "like pass@1, for rewards that are not just right or wrong",
        "the policy solves the task",
        "the policy still fails, or the verifier cannot read its answers: look at some groups",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
