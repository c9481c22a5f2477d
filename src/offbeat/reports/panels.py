"""The plots and tables in the report of one run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from offbeat.metrics import METRICS
from offbeat.reports.history import NotableEvent
from offbeat.reports.plot import Plot, Series
from offbeat.reports.record import RunRecord, summarize_improvements
from offbeat.reports.words import capitalized, size

LAG_METRICS = ("drift_tv_token", "ess", "gate_stopped_up", "gate_stopped_down")
SMOOTHING = 20
"""The running mean of the training reward covers 1/20 of the run."""


def learning_plots(run: RunRecord) -> Iterator[Plot]:
    """Yield pass rates, training rewards, and predicted against realized improvement."""
    yield pass_rate_plot(run)
    steps, rewards = run.history.series("reward_mean")
    yield Plot(
        "Training reward",
        [Series("each step", steps, rewards, style="faint"), Series("running mean", steps, running_mean(rewards))],
        note="Mean reward of each batch. The behavior policy generated it and is older than the policy by the lag.",
    )
    yield improvement_plot(run)


def pass_rate_plot(run: RunRecord) -> Plot:
    x, rates = run.history.pass_rates()
    note = "This run has no evaluations. To get them, set evaluation.every."
    if rates:
        prompts = run.history.evaluations[-1].prompts
        note = f"Every evaluation uses the same {prompts} prompts. The band is the 95 % interval over prompts."
    value, low, high = ([rate[part] for rate in rates] for part in range(3))
    return Plot("pass@1", [Series("pass@1", x, value, low, high)], note=note, y_range=(0, 1))


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
    """Yield lag, drift and effective sample size by step, with publishes marked."""
    history = run.history
    marks = [float(one.version) for one in history.updates]
    x, means = history.mean_lags()
    note = "No group in the batches comes from a version of this run."
    if x:
        limit = f" Fresh groups have at most {run.config.fresh_lag}." if run.generates else ""
        note = f"Lag of the groups in each batch.{limit}"
    largest = [max(one.lags) for one in history.steps if one.lags]
    yield Plot("Lag", [Series("maximum", x, largest, style="faint"), Series("mean", x, means)], note=note, marks=marks)
    drift = _metric_plot(run, "drift_published" if run.generates else "drift_tv_token", "Drift", marks)
    budget = run.config.sync.drift_budget
    if budget is not None:
        drift = replace(drift, note=f"{drift.note} The dashed line is the budget, {budget:g}.", level=budget)
    yield drift
    yield replace(_metric_plot(run, "ess", "Effective sample size", marks), y_range=(0, 1))


def _metric_plot(run: RunRecord, name: str, title: str, marks: Sequence[float]) -> Plot:
    steps, values = run.history.series(name)
    unknown = "Unknown: the batches have no tokens of the version published last, or their log-probs are missing."
    note = f"{capitalized(METRICS[name].meaning)}." if steps else unknown
    return Plot(title, [Series(name, steps, values)], note=note, marks=marks)


def publish_size_plot(run: RunRecord) -> Plot:
    publishes = run.history.publishes
    series = []
    for color, kind in enumerate(dict.fromkeys(one.how for one in publishes)):
        some = [one for one in publishes if one.how == kind]
        x, y = [float(one.version) for one in some], [one.bytes for one in some]
        series.append(Series(kind, x, y, style="stems", color=color))
    total = sum(one.bytes for one in publishes)
    most = max((one.bytes for one in publishes), default=1.0)
    note = f"{size(total)} in total. Full copies would be {size(most * len(publishes))}." if total else ""
    return Plot("Bytes published", series or [Series("", [], [])], note=note, x_name="version", y_range=(0, most))


def publish_reasons(run: RunRecord) -> list[tuple[str, str, int, float]]:
    """Return reason, form (anchor or patch), number of publishes and mean bytes."""
    by_reason: dict[tuple[str, str], list[float]] = {}
    for one in run.history.publishes:
        by_reason.setdefault((one.why, one.how), []).append(one.bytes)
    return [(why, how, len(each), sum(each) / len(each)) for (why, how), each in by_reason.items()]


def fate_rows(run: RunRecord) -> list[tuple[str, int, float | None, float]]:
    """Return fate, number of groups, mean reward (None if unscored) and mean tokens: for all groups, then per fate."""
    if run.groups is None or not len(run.groups):
        return []
    columns, fates = run.groups.columns, [run.groups.ledger.fates[group_id].fate for group_id in run.groups.ids]
    rows = []
    for name, fate in [("all", None), *((fate.value, fate) for fate in dict.fromkeys(fates))]:
        chosen = np.array([fate is None or one is fate for one in fates])
        scored = chosen & (columns.scored > 0)
        reward = float(columns.reward_mean[scored].mean()) if scored.any() else None
        rows.append((name, int(chosen.sum()), reward, float(columns.tokens[chosen].mean())))
    return rows


def lag_rows(run: RunRecord) -> list[tuple[str, int, list[float | None]]]:
    """Return lag bucket, number of steps with tokens of this lag, and the mean of each of `LAG_METRICS` over them."""
    buckets = {bucket for one in run.history.steps for bucket in one.by_lag}
    rows = []
    for bucket in sorted(buckets, key=_lowest_lag):
        seen = [one.by_lag[bucket] for one in run.history.steps if bucket in one.by_lag]
        columns = [[one[name] for one in seen if name in one] for name in LAG_METRICS]
        rows.append((bucket, len(seen), [sum(c) / len(c) if c else None for c in columns]))
    return rows


def _lowest_lag(bucket: str) -> float:
    """Return the first number of '2-3' or '32+'; a bucket without a number (tokens of no version) sorts last."""
    digits = bucket.rstrip("+").split("-")[0]
    return float(digits) if digits.isdecimal() else float("inf")


@dataclass(frozen=True)
class EventRow:
    """Consecutive equal events as one line of the health section."""

    first: int
    last: int
    times: int
    event: NotableEvent


def merge_repeats(events: Sequence[NotableEvent]) -> list[EventRow]:
    """Merge consecutive events with the same kind and text.

    >>> alarms = [NotableEvent(3, "alarm", "ess"), NotableEvent(4, "alarm", "ess")]
    >>> [(row.first, row.last, row.times) for row in merge_repeats(alarms)]
    [(3, 4, 2)]
    """
    rows: list[EventRow] = []
    for event in events:
        if rows and (rows[-1].event.kind, rows[-1].event.text) == (event.kind, event.text):
            rows[-1] = EventRow(rows[-1].first, event.step, rows[-1].times + 1, event)
        else:
            rows.append(EventRow(event.step, event.step, 1, event))
    return rows


def running_mean(values: Sequence[float], width: int | None = None) -> list[float]:
    """Return, at each place, the mean of the last `width` values; by default 1/`SMOOTHING` of them.

    >>> running_mean([0.0, 1.0, 2.0], 2)
    [0.0, 0.5, 1.5]
    """
    width = width or max(1, len(values) // SMOOTHING)
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - width)]) / min(end, width) for end in range(1, len(sums))]
