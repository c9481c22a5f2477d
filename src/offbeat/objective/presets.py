"""The published objectives, each a choice on the axes of `spec.py`. No torch.

`scripts/build_docs.py` writes `docs/reference/presets.md` from this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from offbeat.objective.measured import MeasuredLag, failing_drift, measured_lags
from offbeat.objective.spec import (
    Advantage,
    Against,
    Aggregate,
    CentredBand,
    ExpWeight,
    GroupESS,
    Importance,
    Level,
    Objective,
    OneSide,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    Tapered,
    Truncate,
    TwoSide,
)

P1 = "Yao, Chen et al. 2025, arXiv 2509.24203"
P2 = "Mroueh et al. 2025, arXiv 2505.22257"


@dataclass(frozen=True)
class Preset:
    """An objective with its name, its source and what is known about it."""

    name: str
    objective: Objective
    equation: str
    """The term per token (or per completion y) that is maximized, as LaTeX."""
    source: str
    use: str
    """When to choose it."""
    reported_lag: float
    """The largest lag at which it is reported to learn well; inf for data of any age.

    The reports are at a learning rate of about 1e-6. Lag in steps means nothing without the learning rate: at a rate
    ten times higher the policy drifts as far in a tenth of the steps.
    """
    lag_evidence: str
    """Who reports it."""
    collapses: str = ""
    """A report that it collapses at any lag; empty if there is none."""

    @property
    def measured(self) -> Sequence[MeasuredLag]:
        """What our own runs say about it under lag, with the learning rates and the drift; empty if not measured."""
        return [one for one in measured_lags().get(self.name, ()) if one.plain]

    @property
    def drift_limit(self) -> float | None:
        """The smallest drift at which it fails in our own runs; None if it never does."""
        return failing_drift(self.measured)


_WIDE = (
    "P1 reports that a wider clip, (0.6, 2.0), learns faster and is unstable only fully offline; in our own runs it "
    "fails at v = 5 (docs/evidence.md)."
)
_FIRST_LOOK = "It costs one more forward pass per update, because it looks at the whole batch first."
_GRPO = Objective(
    Advantage.STD_SAMPLE, gate=OneSide(), weight=Importance(), aggregate=Aggregate.SEQUENCE_MEAN_TOKEN_MEAN
)
_P2 = replace(_GRPO, advantage=Advantage.WHITENED, zero_variance_mask=True)
_TIS = Objective(
    Advantage.STD_SAMPLE, against=Against.PROXIMAL, gate=OneSide(), weight=Importance(), correction=Truncate(cap=2.0)
)

_ALL = (
    Preset(
        "grpo",
        _GRPO,
        r"\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)",
        "Shao et al. 2024, arXiv 2402.03300",
        "The common baseline. Under lag its clip, centered on 1, keeps it stable.",
        20,
        "P1, GSM8K: sync every 20 steps and 10 steps of offset learn like fresh data",
    ),
    Preset(
        "grpo-masked",
        _P2,
        r"\mathbb{1}[\mathrm{Var}\,r > 0]\,\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)",
        P2,
        "GRPO without the groups that are all right or all wrong; whitened with ε inside the root.",
        20,
        "P2: 50 %, against 45 % and unstable without the mask (GSM8K, fresh data); lag as for grpo",
    ),
    Preset(
        "grpo-off-policy",
        replace(_P2, gate=CentredBand()),
        r"\min(r A, \mathrm{clip}(r, \max(r'-\epsilon, 0), r'+\epsilon) A),\; r = \pi/\alpha,\; r' = \pi_k/\alpha",
        P2,
        "The objective of P2 for a lagged server. With one update per batch the band never binds: the step is an "
        "unclipped importance-weighted gradient, so set objective.weight_cap if the lag is large.",
        9,
        "P2: sync every 10 steps gives 50 %, stable (GSM8K); as good as fresh data at 1.5B",
    ),
    Preset(
        "rec-oneside-is",
        Objective(gate=OneSide(), weight=Importance()),
        r"M\,\mathrm{sg}(\rho)\,A\log\pi",
        P1,
        "GRPO without division by the standard deviation, averaged over tokens. " + _WIDE,
        inf,
        "P1: lags (20, 0), (1, 10) and fully offline",
    ),
    Preset(
        "rec-oneside-nois",
        Objective(gate=OneSide()),
        r"M\,A\log\pi",
        P1,
        "rec-oneside-is without importance sampling: the gate regularizes. Try this first under lag. " + _WIDE,
        inf,
        "P1: lags (20, 0), (1, 10) and fully offline, on a par with importance sampling",
    ),
    Preset(
        "rec-twoside",
        Objective(gate=TwoSide()),
        r"\mathbb{1}[1-\epsilon_{lo} \le \rho \le 1+\epsilon_{hi}]\,A\log\pi",
        P1,
        "Stricter than one-side: no token outside the band counts. For data with extreme ratios.",
        20,
        "P1: sync every 20 steps",
    ),
    Preset(
        "rec-ring",
        Objective(gate=Ring()),
        r"M_{\mathrm{ring}}\,A\log\pi",
        P1,
        "rec-twoside, but tokens far outside the band pass if the update brings them back.",
        20,
        "P1: sync every 20 steps",
    ),
    Preset(
        "red-drop",
        Objective(drop_surplus=True),
        r"A^{\mathrm{kept}}\log\pi",
        P1,
        "For few right answers, as early in training: balances right and wrong, gates no tokens, needs no log-probs.",
        20,
        "P1: sync every 20 steps, about as good as rec-oneside with a wide clip",
    ),
    Preset(
        "red-weight",
        Objective(exp_weight=ExpWeight()),
        r"e^{A/T} A\log\pi",
        P1,
        "For stored answers and answers of other models, without log-probs: tends to imitate the good ones.",
        20,
        "P1: better than GRPO at similar KL (GSM8K, MATH, ToolACE, Guru-Math)",
    ),
    Preset(
        "red-weight-adaptive",
        Objective(exp_weight=ExpWeight(adaptive=True)),
        r"e^{A/T^*} A\log\pi,\; T^* : \textstyle\sum_y A e^{A/T^*} |y| \approx 0",
        "later work by the group of P1",
        "red-weight for data in which wrong answers are much longer than right ones and would dominate.",
        20,
        "as red-weight",
    ),
    Preset(
        "opmd",
        Objective(regularizers=(SquaredLogRatio(tau=0.1),), aggregate=Aggregate.SEQUENCE_MEAN_TOKEN_SUM),
        r"A\log\pi(y) - \tfrac{\tau}{2}\left(\log\tfrac{\pi(y)}{\alpha(y)}\right)^2",
        "Kimi k1.5, arXiv 2501.12599; P1",
        "A pull toward the behavior policy instead of a gate, on whole completions. For short answers.",
        inf,
        "derived for data of any age (P1, appendix); tune tau",
    ),
    Preset(
        "opmd-token",
        Objective(regularizers=(SquaredLogRatio(tau=0.1, level=Level.TOKEN),)),
        r"A\log\pi - \tfrac{\tau}{2}\left(\log\tfrac{\pi}{\alpha}\right)^2",
        "a variant of opmd: Kimi k1.5, arXiv 2501.12599; P1",
        "opmd with the square of each token, averaged over tokens, instead of the square of the sum over the "
        "completion. The pull does not grow with length, so it also suits long answers, but opmd's derivation does not "
        "cover it.",
        0,
        "no report of its own",
    ),
    Preset(
        "asymre",
        Objective(baseline_shift=0.1),
        r"(r - \bar r + \beta)\log\pi",
        "Arnal et al. 2025, arXiv 2506.20520; P1",
        "For stored data: a lowered baseline favors imitation, even of all-wrong groups unless they are masked.",
        inf,
        "derived for off-policy data; P1 tests sync every 20 steps and fully offline",
    ),
    Preset(
        "imitate",
        Objective(Advantage.REWARD),
        r"r\log\pi",
        "supervised training on right answers; Dong et al. 2023, arXiv 2304.06767",
        "Before RL, on stored answers of a better model: right ones are imitated, wrong ones left out. Rewards are not "
        "negative. It learns nothing from wrong answers, so continue with another objective.",
        inf,
        "supervised training: it does not matter who wrote the answers",
    ),
    Preset(
        "reinforce",
        Objective(),
        r"(r - \bar r)\log\pi",
        P1,
        "For fresh data only. The control that shows why gates are needed.",
        0,
        "P1: without a gate it collapses under lag; so it does on a three-armed bandit in the tests",
        collapses="without a gate it collapses under lag (P1, arXiv 2509.24203)",
    ),
    Preset(
        "dr-grpo",
        Objective(gate=OneSide(), weight=Importance(), aggregate=Aggregate.CONSTANT),
        r"\tfrac{1}{L_{max}}\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)",
        "Liu et al. 2025, arXiv 2503.20783",
        "GRPO without its bias toward long wrong answers: no standard deviation, constant length.",
        20,
        "same gate and weight as grpo",
    ),
    Preset(
        "dapo",
        Objective(Advantage.STD_SAMPLE, zero_variance_mask=True, gate=OneSide(low=0.2, high=0.28), weight=Importance()),
        r"\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon_{lo}, 1+\epsilon_{hi}) A)",
        "Yu et al. 2025, arXiv 2503.14476",
        "For long reasoning: a higher upper clip keeps exploration up, token mean, groups of equal rewards left out.",
        20,
        "same gate and weight as grpo, with a slightly higher upper clip",
    ),
    Preset(
        "cispo",
        Objective(Advantage.STD_SAMPLE, weight=Importance(cap=5.0)),
        r"\mathrm{sg}(\min(\rho, c))\,A\log\pi",
        "MiniMax-M1 2025, arXiv 2506.13585",
        "Keeps the gradient of every token and limits its weight instead, so rare but decisive tokens still count.",
        15,
        "published with up to 16 updates per batch, without a lagged server; an update counts as a step of lag",
    ),
    Preset(
        "gspo",
        replace(_GRPO, ratio=Level.GEOMETRIC, gate=OneSide(low=3e-4, high=4e-4)),
        r"\min(s A, \mathrm{clip}(s, 1-\epsilon_{lo}, 1+\epsilon_{hi}) A),\; s = (\pi(y)/\alpha(y))^{1/|y|}",
        "Zheng et al. 2025, arXiv 2507.18071",
        "For mixture-of-experts models, whose token ratios are noisy. Its band is narrow: widen it before you use lag.",
        4,
        "published with four mini-batches per batch, without a lagged server",
    ),
    Preset(
        "m2po",
        Objective(Advantage.STD_SAMPLE, gate=SecondMoment(limit=0.04), weight=Importance()),
        r"\mathbb{1}[y_t \notin S]\,\rho A,\; S : \text{furthest tokens with } A\log\rho > 0 \text{, until the mean } "
        r"(\log\rho)^2 \text{ of the others is} \le \tau_{M_2}",
        "Zheng et al. 2025, arXiv 2510.01161, algorithm 1",
        "For very old rollouts: stops only the outliers of a batch, far fewer tokens than a clip. " + _FIRST_LOOK,
        256,
        "published with rollouts at least 256 updates old, on a par with fresh ones (1.7B to 32B, mathematics)",
    ),
    Preset(
        "ess-gate",
        Objective(gate=OneSide(), weight=Importance(), reject=GroupESS(least=0.5)),
        r"\mathbb{1}[\mathrm{ESS}(\pi(y)/\alpha(y)) \ge \tfrac12]\cdot\text{rec-oneside-is}",
        "after VCPO, Huang et al. 2026, arXiv 2602.17616, which scales the learning rate by the ESS instead",
        "rec-oneside-is without the groups in which one completion outweighs the others. For short answers: sequence "
        "ratios of long ones vary so widely that most groups are stopped. " + _FIRST_LOOK,
        20,
        "no report of its own; P1 syncs rec-oneside-is every 20 steps, and VCPO reports that a falling ESS predicts "
        "collapse",
    ),
    Preset(
        "topr",
        Objective(ratio=Level.SEQUENCE, weight=Tapered(), aggregate=Aggregate.SEQUENCE_MEAN_TOKEN_SUM),
        r"\left(\mathbb{1}[A \ge 0] + \mathbb{1}[A < 0]\,\min(\pi(y)/\alpha(y), 1)\right) A\log\pi(y)",
        "Le Roux et al. 2025, arXiv 2503.14286",
        "For fixed data with many wrong answers: right ones are imitated, wrong ones fade as they become unlikely.",
        inf,
        "derived and published for fully offline data",
    ),
    Preset(
        "tis",
        _TIS,
        r"\min(\pi_k/\alpha, C)\,\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon) A),\; r = \pi/\pi_k",
        "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
        "Truncated importance sampling: corrects the gap between engine and trainer, over several updates per batch.",
        4,
        "published for the engine gap; lag affects the same ratio",
    ),
    Preset(
        "decoupled-ppo",
        replace(_TIS, correction=Truncate()),
        r"\tfrac{\pi_k}{\alpha}\,\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon) A),\; r = \pi/\pi_k",
        "Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298",
        "For asynchronous runs with several updates per batch: corrects lag, and clips only the updates on this batch.",
        8,
        "AReaL: staleness up to 8",
    ),
    Preset(
        "sequence-mask",
        replace(_TIS, reject=Reject(0.5, 2.0, Level.SEQUENCE)),
        r"\mathbb{1}[\tfrac12 \le \pi_k(y)/\alpha(y) \le 2]\cdot\text{tis}",
        "rejection sampling as in verl's rollout correction, 2025",
        "tis without the completions that no longer resemble the trainer's policy. For short answers and small lag.",
        4,
        "published for the engine gap; for long answers the product soon leaves the band",
    ),
    Preset(
        "geometric-mask",
        replace(_TIS, reject=Reject(0.99, 1.01, Level.GEOMETRIC)),
        r"\mathbb{1}[0.99 \le (\pi_k(y)/\alpha(y))^{1/|y|} \le 1.01]\cdot\text{tis}",
        "rejection sampling as in verl's rollout correction, 2025",
        "sequence-mask with the geometric mean, which does not depend on length. For long answers.",
        4,
        "published for the engine gap with tighter bands",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
"""All presets by name.

>>> PRESETS["rec-oneside-nois"].objective.gate
OneSide(low=0.2, high=0.2)
"""
