"""The published objectives, each one line of choices on the axes of `spec.py`. No torch.

`docs/objectives.md` is built from this file by `scripts/build-docs`.
"""

from dataclasses import dataclass, replace
from math import inf

from offbeat.objective.spec import (
    Advantage,
    Against,
    Aggregate,
    CentredBand,
    ExpWeight,
    Importance,
    Level,
    Objective,
    OneSide,
    Reject,
    Ring,
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
    """The summand per token (or per completion y), LaTeX; maximised."""
    source: str
    use: str
    """When to choose it, for a person who has to."""
    lag_limit: float
    """The largest lag anybody has reported it to learn well under; inf for data of any age."""
    lag_evidence: str


_WIDE = "Wider, (0.6, 2.0), learns faster and was unstable only fully offline."
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
        "The common baseline. Under lag its clip, centred on 1, is what keeps it stable.",
        20,
        "P1, GSM8K: sync every 20 steps and 10 steps of offset learn like fresh data",
    ),
    Preset(
        "grpo-masked",
        _P2,
        r"\mathbb{1}[\mathrm{Var}\,r > 0]\,\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)",
        P2,
        "GRPO that leaves out groups all right or all wrong, whitened with ε inside the root.",
        20,
        "P2: 50 % against 45 % unstable without the mask (GSM8K, fresh data); lag as for grpo",
    ),
    Preset(
        "grpo-off-policy",
        replace(_P2, gate=CentredBand()),
        r"\min(r A, \mathrm{clip}(r, \max(r'-\epsilon, 0), r'+\epsilon) A),\; r = \pi/\alpha,\; r' = \pi_k/\alpha",
        P2,
        "The paper's lagged server. With one update per batch the band never binds: the step is an unclipped "
        "importance-weighted gradient, so set a cap on the weight when lag is long.",
        9,
        "P2: sync every 10 steps gives 50 %, stable (GSM8K); parity at 1.5B",
    ),
    Preset(
        "rec-oneside-is",
        Objective(gate=OneSide(), weight=Importance()),
        r"M\,\mathrm{sg}(\rho)\,A\log\pi",
        P1,
        "GRPO without dividing by the standard deviation, averaged over tokens. " + _WIDE,
        inf,
        "P1: lags (20, 0), (1, 10) and fully offline",
    ),
    Preset(
        "rec-oneside-nois",
        Objective(gate=OneSide()),
        r"M\,A\log\pi",
        P1,
        "The same without importance sampling: what regularises is the gate. The first to try under lag. " + _WIDE,
        inf,
        "P1: lags (20, 0), (1, 10) and fully offline, on a par with importance sampling",
    ),
    Preset(
        "rec-twoside",
        Objective(gate=TwoSide()),
        r"\mathbb{1}[1-\epsilon_{lo} \le \rho \le 1+\epsilon_{hi}]\,A\log\pi",
        P1,
        "Stricter: no token outside the band counts. For data with odd tails.",
        20,
        "P1: sync every 20 steps",
    ),
    Preset(
        "rec-ring",
        Objective(gate=Ring()),
        r"M_{\mathrm{ring}}\,A\log\pi",
        P1,
        "Two-side, with tokens far outside let through when the update brings them back.",
        20,
        "P1: sync every 20 steps",
    ),
    Preset(
        "red-drop",
        Objective(drop_surplus=True),
        r"A^{\mathrm{kept}}\log\pi",
        P1,
        "Early training with few right answers: balances right and wrong instead of gating tokens. Needs no log-probs.",
        20,
        "P1: sync every 20 steps, about the same as wide one-side",
    ),
    Preset(
        "red-weight",
        Objective(exp_weight=ExpWeight()),
        r"e^{A/T} A\log\pi",
        P1,
        "Stored answers and other models' answers without log-probs: leans towards imitating the good ones.",
        20,
        "P1: above GRPO at similar KL (GSM8K, MATH, ToolACE, Guru-Math)",
    ),
    Preset(
        "red-weight-adaptive",
        Objective(exp_weight=ExpWeight(adaptive=True)),
        r"e^{A/T^*} A\log\pi,\; T^* : \textstyle\sum_y A e^{A/T^*} |y| \approx 0",
        "later work of P1's group",
        "red-weight where wrong answers are much longer than right ones and would dominate.",
        20,
        "as red-weight",
    ),
    Preset(
        "opmd",
        Objective(regularizers=(SquaredLogRatio(tau=0.1),), aggregate=Aggregate.SEQUENCE_MEAN_TOKEN_SUM),
        r"A\log\pi(y) - \tfrac{\tau}{2}\left(\log\tfrac{\pi(y)}{\alpha(y)}\right)^2",
        "Kimi k1.5, arXiv 2501.12599; P1",
        "A pull towards the author of the data instead of a gate, on whole completions: short answers.",
        inf,
        "derived for data of any age (P1, appendix); tau must be tuned",
    ),
    Preset(
        "asymre",
        Objective(baseline_shift=0.1),
        r"(r - \bar r + \beta)\log\pi",
        "Arnal et al. 2025, arXiv 2506.20520; P1",
        "Stored data: a lowered baseline leans towards imitation, of all-wrong groups too unless they are masked.",
        inf,
        "derived for off-policy data; P1 tests sync every 20 steps and offline",
    ),
    Preset(
        "reinforce",
        Objective(),
        r"(r - \bar r)\log\pi",
        P1,
        "Fresh data only. The control that shows what gates are for.",
        0,
        "P1: without a gate it collapses under lag; also our three-armed bandit",
    ),
    Preset(
        "dr-grpo",
        Objective(gate=OneSide(), weight=Importance(), aggregate=Aggregate.CONSTANT),
        r"\tfrac{1}{L_{max}}\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)",
        "Liu et al. 2025, arXiv 2503.20783",
        "GRPO without its bias towards long wrong answers: no standard deviation, constant length.",
        20,
        "same gate and weight as grpo",
    ),
    Preset(
        "dapo",
        Objective(Advantage.STD_SAMPLE, zero_variance_mask=True, gate=OneSide(low=0.2, high=0.28), weight=Importance()),
        r"\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon_{lo}, 1+\epsilon_{hi}) A)",
        "Yu et al. 2025, arXiv 2503.14476",
        "Long reasoning: higher upper clip keeps exploring, token mean, groups without contrast left out.",
        20,
        "same gate and weight as grpo, a little wider above",
    ),
    Preset(
        "cispo",
        Objective(Advantage.STD_SAMPLE, weight=Importance(cap=5.0)),
        r"\mathrm{sg}(\min(\rho, c))\,A\log\pi",
        "MiniMax-M1 2025, arXiv 2506.13585",
        "Keeps every token's gradient and bounds its weight instead: rare but decisive tokens stay in.",
        4,
        "published with up to 16 updates on a batch, no lagged server",
    ),
    Preset(
        "gspo",
        replace(_GRPO, ratio=Level.GEOMETRIC, gate=OneSide(low=3e-4, high=4e-4)),
        r"\min(s A, \mathrm{clip}(s, 1-\epsilon_{lo}, 1+\epsilon_{hi}) A),\; s = (\pi(y)/\alpha(y))^{1/|y|}",
        "Zheng et al. 2025, arXiv 2507.18071",
        "Mixture-of-experts models, where token ratios are noise. Its band is narrow: widen it before using lag.",
        4,
        "published with four mini-batches a batch, no lagged server",
    ),
    Preset(
        "topr",
        Objective(ratio=Level.SEQUENCE, weight=Tapered(), aggregate=Aggregate.SEQUENCE_MEAN_TOKEN_SUM),
        r"\left(\mathbb{1}[A \ge 0] + \mathbb{1}[A < 0]\,\min(\pi(y)/\alpha(y), 1)\right) A\log\pi(y)",
        "Le Roux et al. 2025, arXiv 2503.14286",
        "Fixed data sets with many wrong answers: right ones are imitated, wrong ones fade as they become unlikely.",
        inf,
        "derived and published for fully offline data",
    ),
    Preset(
        "tis",
        _TIS,
        r"\min(\pi_k/\alpha, C)\,\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon) A),\; r = \pi/\pi_k",
        "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'",
        "Truncated importance sampling: mends the gap between inference engine and trainer; several updates a batch.",
        4,
        "published for the engine gap; lag enters the same ratio",
    ),
    Preset(
        "decoupled-ppo",
        replace(_TIS, correction=Truncate()),
        r"\tfrac{\pi_k}{\alpha}\,\min(r A, \mathrm{clip}(r, 1-\epsilon, 1+\epsilon) A),\; r = \pi/\pi_k",
        "Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298",
        "Asynchronous runs with several updates a batch: lag is corrected, and only this batch's updates are clipped.",
        8,
        "AReaL: staleness up to 8",
    ),
    Preset(
        "sequence-mask",
        replace(_TIS, reject=Reject(0.5, 2.0, Level.SEQUENCE)),
        r"\mathbb{1}[\tfrac12 \le \pi_k(y)/\alpha(y) \le 2]\cdot\text{tis}",
        "rejection sampling as in verl's rollout correction, 2025",
        "tis that also leaves out completions the trainer no longer recognises; short answers, small lag.",
        4,
        "published for the engine gap; the product over a long answer leaves the band soon",
    ),
    Preset(
        "geometric-mask",
        replace(_TIS, reject=Reject(0.99, 1.01, Level.GEOMETRIC)),
        r"\mathbb{1}[0.99 \le (\pi_k(y)/\alpha(y))^{1/|y|} \le 1.01]\cdot\text{tis}",
        "rejection sampling as in verl's rollout correction, 2025",
        "The same test on the geometric mean, which does not shrink with length: long answers.",
        4,
        "published for the engine gap with tighter bands",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
"""By name.

>>> PRESETS["rec-oneside-nois"].objective.gate
OneSide(low=0.2, high=0.2)
"""
