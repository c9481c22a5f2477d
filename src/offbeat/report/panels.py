"""The plots and tables of a report, from the record of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from offbeat.metrics import METRICS
from offbeat.report.history import Note
from offbeat.report.plot import Plot, Series
from offbeat.report.record import RunRecord, in_words
from offbeat.report.words import size

BY_LAG = ("drift_tv_token", "ess", "gate_stopped_up", "gate_stopped_down")
SMOOTH = 20
"""The running mean of training reward is over a twentieth of the run."""


def learning(run: RunRecord) -> Iterator[Plot]:
    """What it came to: pass rates, rewards, and whether improvement was foreseen."""
    yield pass_rates(run)
    steps, rewards = run.history.series("reward_mean")
    smooth = running_mean(rewards, max(1, len(rewards) // SMOOTH))
    yield Plot(
        "Training reward",
        [Series("each step", steps, rewards, style="faint"), Series("running mean", steps, smooth)],
        note="What the behavior policy earned on the batches: older than the policy itself by their lag.",
    )
    yield improvement(run)


def pass_rates(run: RunRecord) -> Plot:
    """Evaluations with their intervals."""
    found = [(one.step, one.estimates["pass@1"]) for one in run.history.evaluations if "pass@1" in one.estimates]
    prompts = run.history.evaluations[-1].prompts if found else 0
    note = f"With 95 % intervals over {prompts} prompts, the same at every step."
    if not found:
        note = "This run made no evaluations: set evaluation.every to get them."
    x, three = [float(step) for step, _ in found], [values for _, values in found]
    series = Series("pass@1", x, [v[0] for v in three], [v[1] for v in three], [v[2] for v in three])
    return Plot("pass@1", [series], note=note, marks=(), y_range=(0, 1))


def improvement(run: RunRecord) -> Plot:
    """Predicted against realised at each publish."""
    found = run.improvements()
    if found:
        note = in_words(found) + " A prediction is made before the last update of its batch."
    elif run.cannot_predict:
        note = "Every batch is by the policy it trains: there is nothing to predict."
    elif run.shares_log:
        note = "The experience log is shared: its versions are not only this run's, so nothing can be read off."
    else:
        note = "No version that wrote groups was published after another."
    x = [float(one.version) for one in found]
    realised = [one.realised for one in found]
    low, high = ([one.realised + sign * one.margin for one in found] for sign in (-1, 1))
    return Plot(
        "Improvement at publishes",
        [
            Series("realised", x, realised, low, high, style="dots"),
            Series("predicted", x, [one.predicted for one in found], colour=1),
        ],
        note=note,
        level=("", 0.0),
    )


def lag_and_drift(run: RunRecord) -> Iterator[Plot]:
    """Over time, with publishes marked."""
    history = run.history
    marks = [float(one.version) for one in history.publishes if one.version > 0]
    lagged = [one for one in history.steps if one.lags]
    x = [float(one.step) for one in lagged]
    note = f"At most {run.config.largest_lag} allowed." if run.generates else "Offline: of the log it learns from."
    yield Plot(
        "Lag",
        [
            Series("largest of the batch", x, [max(one.lags) for one in lagged], style="faint"),
            Series("mean", x, [sum(one.lags) / len(one.lags) for one in lagged]),
        ],
        note=note if lagged else "No group was written by a version of this run.",
        marks=marks,
    )
    budget = run.config.sync.drift_budget
    for name, title in (("drift_tv_token", "Drift"), ("ess", "Effective sample size")):
        steps, values = history.series(name)
        level = ("budget", budget) if budget is not None and name == "drift_tv_token" else None
        note = METRICS[name].meaning if steps else "Not known: no behavior log-probs."
        yield Plot(
            title,
            [Series(name, steps, values)],
            note=_sentence(note) + (f" Budget {budget:g}." if level else ""),
            marks=marks,
            level=level,
            y_range=(0, 1) if name == "ess" else None,
        )


def sync_bytes(run: RunRecord) -> Plot:
    """What each publish wrote."""
    kinds = list(dict.fromkeys(one.how for one in run.history.publishes))
    series = []
    for colour, kind in enumerate(kinds):
        some = [one for one in run.history.publishes if one.how == kind]
        series.append(
            Series(kind, [float(one.version) for one in some], [one.bytes for one in some], (), (), "stems", colour)
        )
    total = sum(one.bytes for one in run.history.publishes)
    most = max((one.bytes for one in run.history.publishes), default=1.0)
    whole = most * len(run.history.publishes)
    note = f"{size(total)} in all; complete copies each time would have been {size(whole)}." if total else ""
    return Plot("Bytes published", series or [Series("", [], [])], note=note, x_name="version", y_range=(0, most))


@dataclass(frozen=True)
class PublishReasonRow:
    """Publishes made for one reason, in one way."""

    why: str
    how: str
    count: int
    bytes: float
    """Mean."""


def reasons(run: RunRecord) -> list[PublishReasonRow]:
    """Why versions were published and how they were written."""
    gathered: dict[tuple[str, str], list[float]] = {}
    for one in run.history.publishes:
        gathered.setdefault((one.why, one.how), []).append(one.bytes)
    return [PublishReasonRow(why, how, len(each), sum(each) / len(each)) for (why, how), each in gathered.items()]


@dataclass(frozen=True)
class Fared:
    """Groups that fared alike."""

    name: str
    groups: int
    reward: float | None
    tokens: float


def fared(run: RunRecord) -> list[Fared]:
    """Generated, trained and dropped side by side: whether what is dropped differs from what is trained on."""
    if run.groups is None or not len(run.groups):
        return []
    columns, fates = run.groups.columns, [run.groups.ledger.fates[name].fate for name in run.groups.ids]
    rows = []
    for name, fate in [("all", None), *((fate.value, fate) for fate in dict.fromkeys(fates))]:
        chosen = np.array([fate is None or one is fate for one in fates])
        scored = chosen & (columns.scored > 0)
        reward = float(columns.reward_mean[scored].mean()) if scored.any() else None
        rows.append(Fared(name, int(chosen.sum()), reward, float(columns.tokens[chosen].mean())))
    return rows


@dataclass(frozen=True)
class LagRow:
    """Means over the steps that had tokens of this lag."""

    bucket: str
    steps: int
    values: Sequence[float | None]


def by_lag(run: RunRecord) -> list[LagRow]:
    """Gates, drift and effective sample size by lag; columns as in `BY_LAG`."""
    buckets = {bucket for one in run.history.steps for bucket in one.by_lag}
    rows = []
    for bucket in sorted(buckets, key=_lowest_lag):
        seen = [one.by_lag[bucket] for one in run.history.steps if bucket in one.by_lag]
        columns = [[one[name] for one in seen if name in one] for name in BY_LAG]
        rows.append(LagRow(bucket, len(seen), [sum(c) / len(c) if c else None for c in columns]))
    return rows


def _lowest_lag(bucket: str) -> float:
    """Of '2-3' or '32+'; tokens that no version of ours wrote come last."""
    digits = bucket.rstrip("+").split("-")[0]
    return float(digits) if digits.isdecimal() else float("inf")


@dataclass(frozen=True)
class Told:
    """One line of the health section: the same thing said several times is said once."""

    first: int
    last: int
    times: int
    note: Note


def told(notes: Sequence[Note]) -> list[Told]:
    """In order, repetitions gathered.

    >>> [(one.first, one.last, one.times) for one in told([Note(3, "alarm", "ess"), Note(4, "alarm", "ess")])]
    [(3, 4, 2)]
    """
    found: list[Told] = []
    for note in notes:
        if found and (found[-1].note.kind, found[-1].note.says) == (note.kind, note.says):
            found[-1] = Told(found[-1].first, note.step, found[-1].times + 1, note)
        else:
            found.append(Told(note.step, note.step, 1, note))
    return found


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Of the last `width` values.

    >>> running_mean([0.0, 1.0, 2.0], 2)
    [0.0, 0.5, 1.5]
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[max(0, end - width)]) / min(end, width) for end in range(1, len(sums))]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
