"""The tables in the report of one run, and the plot of its publishes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.reports.history import NotableEvent
from offbeat.reports.plot import Plot, Series
from offbeat.reports.record import RunRecord
from offbeat.words import size

LAG_METRICS = ("drift_tv_token", "ess", "gate_stopped_up", "gate_stopped_down")


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
        rows.append(
            ("unknown" if bucket == "none" else bucket, len(seen), [sum(c) / len(c) if c else None for c in columns])
        )
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
