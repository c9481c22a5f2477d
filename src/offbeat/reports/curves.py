"""The curves of one run, by step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from offbeat.metrics import METRICS
from offbeat.reports.improvement import summarize_improvements
from offbeat.reports.plot import Plot, Series
from offbeat.reports.record import RunRecord
from offbeat.words import capitalized, count

SMOOTHING: Final = 20
"""The running mean of a noisy curve covers 1/20 of the run."""
TITLES: Final = {
    "completion_length": "Completion length",
    "truncated_share": "Truncated share",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
}
"""Metrics with a plot of their own, in the order of the page."""


def learning_plots(run: RunRecord) -> Iterator[Plot]:
    """Yield reward, pass rate, and what people look at to see whether a policy is healthy."""
    steps, rewards = run.history.series("reward_mean")
    note = "Mean reward of each batch. The behavior policy generated it and is older than the policy by the lag."
    yield Plot("Training reward", _smoothed(steps, rewards), note=note)
    yield pass_rate_plot(run)
    yield metric_plot(run, "completion_length")
    yield metric_plot(run, "truncated_share")
    yield metric_plot(run, "entropy")
    yield kl_plot(run)
    for name in ("grad_norm", "learning_rate", "tokens_per_second"):
        yield metric_plot(run, name)


def metric_plot(run: RunRecord, name: str) -> Plot:
    """Plot one metric by step; without a value, the note says so."""
    steps, values = run.history.series(name)
    note = f"{capitalized(METRICS[name].meaning)}." if steps else f"Unknown: no step of this run has {name}."
    if name == "learning_rate":
        return Plot(TITLES[name], [Series(name, steps, values)], note=note)
    return Plot(TITLES[name], _smoothed(steps, values), note=note)


def _smoothed(steps: Sequence[float], values: Sequence[float]) -> list[Series]:
    return [
        Series("each step", steps, values, style="faint"),
        Series("running mean", steps, running_mean(values)),
    ]


def pass_rate_plot(run: RunRecord) -> Plot:
    """Plot pass@1 with its intervals, from before the first step on."""
    x, rates = run.history.pass_rates()
    note = "This run has no evaluations. To get them, set evaluation.every."
    if rates:
        last = run.history.evaluations[-1]
        kind = {True: "held-out ", False: "training ", None: ""}[last.held_out]
        note = (
            f"Every evaluation uses the same {last.prompts} {kind}prompts. The band is the 95 % interval over prompts."
        )
        note += " Step 0 is before the first step." * (x[0] == 0)
    value, low, high = ([rate[part] for rate in rates] for part in range(3))
    return Plot("pass@1", [Series("pass@1", x, value, low, high)], note=note, y_range=(0, 1))


def kl_plot(run: RunRecord) -> Plot:
    """Plot the KL from the reference policy, if there is one, and from the policy that wrote the batch."""
    named = (("reference policy", "reference_kl"), ("behavior policy", "drift_kl_token"))
    curves = [(name, *run.history.series(metric)) for name, metric in named]
    series = [Series(name, x, y, color=color) for color, (name, x, y) in enumerate(curves) if x]
    note = f"KL divergence per token between the policy and the {' and the '.join(one.name for one in series)}."
    if not series:
        note = "Unknown: the objective has no reference policy, and the log-probs of the behavior policy are missing."
    return Plot("KL", series, note=note)


def improvement_plot(run: RunRecord) -> Plot:
    """Plot predicted and realized improvement at each publish, with a note that says why it is empty if it is."""
    found = run.improvements()
    if found:
        note = summarize_improvements(found) + " A prediction is made before the last update on its batch."
    elif run.is_on_policy:
        note = "Every batch comes from the policy it trains, so there is nothing to predict."
    elif run.shares_log:
        note = "Not available: other runs share the experience log, so its versions are ambiguous."
    else:
        note = "Not available yet: too few groups from published versions."
    x = [float(one.version) for one in found]
    realized = [one.realized for one in found]
    low, high = ([one.realized + sign * one.margin for one in found] for sign in (-1, 1))
    return Plot(
        "Improvement at publishes",
        [
            Series("realized", x, realized, low, high, style="dots"),
            Series("predicted", x, [one.predicted for one in found], color=1),
        ],
        note=note,
        level=0.0,
    )


def lag_and_drift_plots(run: RunRecord) -> Iterator[Plot]:
    """Yield lag, drift, effective sample size and replays by step, with publishes marked."""
    history = run.history
    marks = [float(one.version) for one in history.updates]
    x, means = history.mean_lags()
    largest = [max(one.lags) for one in history.steps if one.lags]
    series = [Series("maximum", x, largest, style="faint"), Series("mean", x, means)]
    yield Plot("Lag", series, note=lag_note(run), marks=marks)
    drift = _measured(run, "drift_published" if run.generates else "drift_tv_token", "Drift", marks)
    budget = run.config.sync.drift_budget
    if budget is not None:
        drift = replace(drift, note=f"{drift.note} The dashed line is the budget, {budget:g}.", level=budget)
    yield drift
    yield replace(_measured(run, "ess", "Effective sample size", marks), y_range=(0, 1))
    if any(one.replayed for one in history.steps):
        yield replay_plot(run)


def lag_note(run: RunRecord) -> str:
    """Say what the lag is of, and of how many groups it is unknown."""
    steps = run.history.steps
    groups, known = sum(one.groups for one in steps), sum(len(one.lags) for one in steps)
    if not known:
        return "Unknown: no group in the batches comes from a version of this run."
    limit = f" Fresh groups have at most {run.config.fresh_lag}." if run.generates else ""
    missing = f" It is unknown of {groups - known} of {count(groups, 'group')}." if groups > known else ""
    return f"Lag of the groups in each batch.{limit}{missing}"


def replay_plot(run: RunRecord) -> Plot:
    """Plot the share of each batch that comes from the past."""
    steps = [one for one in run.history.steps if one.groups]
    x, share = [float(one.step) for one in steps], [one.replayed / one.groups for one in steps]
    total, groups = sum(one.replayed for one in steps), sum(one.groups for one in steps)
    note = f"Share of each batch that was trained on before: {total} of {groups} in total."
    return Plot("Replayed groups", [Series("replayed", x, share)], note=note, y_range=(0, 1))


def _measured(run: RunRecord, name: str, title: str, marks: Sequence[float]) -> Plot:
    steps, values = run.history.series(name)
    unknown = "Unknown: the batches have no tokens of the version published last, or their log-probs are missing."
    note = f"{capitalized(METRICS[name].meaning)}." if steps else unknown
    return Plot(title, [Series(name, steps, values)], note=note, marks=marks)


def running_mean(values: Sequence[float], width: int | None = None) -> list[float]:
    """Return, at each place, the mean of the last `width` values; by default 1/`SMOOTHING` of them.

    >>> running_mean([0.0, 1.0, 2.0], 2)
    [0.0, 0.5, 1.5]
    """
    width = width or max(1, len(values) // SMOOTHING)
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - width)]) / min(end, width) for end in range(1, len(sums))]
