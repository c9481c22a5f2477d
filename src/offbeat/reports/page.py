"""The report: one HTML file that makes no network requests. Its one script shows values under the pointer.

The template escapes every value it prints: `visible` first, then Jinja's HTML escaping. Only plots are inserted
without escaping, and they contain no text from the model.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from offbeat import __version__, words
from offbeat.config import Config
from offbeat.metrics import METRICS
from offbeat.reports import curves
from offbeat.reports.comparison import compare, name_runs
from offbeat.reports.groups import GroupView, contrast_shares
from offbeat.reports.history import NotableEvent, RunHistory, RunState
from offbeat.reports.improvement import BeforeAfter, before_and_after
from offbeat.reports.live import bottleneck
from offbeat.reports.plot import Plot, Series, draw, draw_stack, values
from offbeat.reports.record import RunRecord
from offbeat.run.directory import RunDirectory
from offbeat.storage.files import write_atomically
from offbeat.types import Json
from offbeat.words import capitalized, count, escaped_pieces, size, truncate, visible

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


def conclusion(run: RunRecord) -> str:
    """Return the sentence at the top of a report."""
    history = run.history
    if not history.steps:
        return f"No step is complete yet (state: {run.state})."
    steps, publishes = count(history.last_step, "step"), count(len(history.updates), "publish", "publishes")
    parts = [f"{learned(history)} in {steps}" + (f" with {publishes}" if run.generates else "")]
    parts.append(bottleneck(history.seconds).split(":")[0] if history.seconds else "time not measured")
    parts.append("the ledger does not balance" if run.imbalance else "the ledger balances")
    if run.state is not RunState.FINISHED:
        parts.append(progress(run))
    return capitalized("; ".join(parts)) + "."


def learned(history: RunHistory) -> str:
    """Return the change in pass@1 if there are two evaluations, otherwise the change in training reward.

    >>> learned(RunHistory())
    'nothing measured'
    """
    _, rates = history.pass_rates()
    if len(rates) > 1:
        first, last = rates[0], rates[-1]
        if last[1] > first[2]:
            return f"pass@1 rose from {first[0]:.2f} to {last[0]:.2f}"
        if last[2] < first[1]:
            return f"pass@1 fell from {first[0]:.2f} to {last[0]:.2f}"
        return f"pass@1 did not change beyond chance ({first[0]:.2f}, then {last[0]:.2f})"
    _, rewards = history.series("reward_mean")
    if not rewards:
        return "nothing measured"
    tenth = max(1, len(rewards) // 10)
    first_tenth, last_tenth = (sum(some) / tenth for some in (rewards[:tenth], rewards[-tenth:]))
    evaluated = f"the only pass@1 is {rates[0][0]:.2f}" if rates else "no evaluations"
    return f"training reward went from {first_tenth:.2f} to {last_tenth:.2f} ({evaluated})"


def progress(run: RunRecord) -> str:
    """Return the state of a run, its step, and how to continue it."""
    at = f"at step {run.history.last_step} of {run.steps}"
    match run.state:
        case RunState.RUNNING:
            return f"still running, {at}"
        case RunState.PAUSED:
            return f"paused {at} (remove the file ‘pause’ to continue)"
        case RunState.STOPPED:
            return f"stopped {at}: {run.history.ended}"
        case RunState.CRASHED:
            return f"crashed {at} (‘offbeat resume’ continues from the last checkpoint)"
        case RunState.FINISHED:
            return f"finished {at}"


MAX_TEXT: Final = 700
"""Characters shown of a prompt or completion."""
MAX_COMPLETIONS: Final = 8
MAX_TITLES: Final = 3
"""Different titles of compared runs that the page names."""


def load_runs(paths: Sequence[Path], names: Sequence[str] = ()) -> list[RunRecord]:
    """Read run directories. `names` has one name for each run or for each configuration; "" is the directory's."""
    configs = [RunDirectory(path).config() for path in paths]
    return [RunRecord.load(path, name) for path, name in zip(paths, name_runs(paths, configs, names), strict=True)]


def write_report(paths: Sequence[Path], out: Path, names: Sequence[str] = ()) -> str:
    """Write one page about these runs and return its conclusion. The file is replaced only when it is complete."""
    runs = load_runs(paths, names)
    write_atomically(out, render(runs).encode(), durable=False)
    if len(runs) == 1:
        return conclusion(runs[0])
    compared = compare(runs)
    return "\n".join([compared.conclusion, *compared.differences])


def render(runs: Sequence[RunRecord], *, live: str = "") -> str:
    """Return the page as HTML. A live page asks its server for news; `live` identifies the state that it shows."""
    page = (
        _environment()
        .get_template("page.html")
        .render(
            **_content(runs),
            policy=content_policy(live=bool(live)),
            style=Markup(_resource("page.css")),
            script=Markup(_resource("page.js")),
            live=live,
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=__version__,
        )
    )
    return page.lstrip()


def content_policy(*, live: bool) -> str:
    """Let only the page's own script run: text of a model that reached the page as HTML would still do nothing."""
    digest = base64.b64encode(hashlib.sha256(_resource("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"{policy}; connect-src 'self'" if live else policy


def render_body(runs: Sequence[RunRecord]) -> str:
    """Return only what is inside `main`."""
    return _environment().get_template("body.html").render(**_content(runs))


def _content(runs: Sequence[RunRecord]) -> dict[str, object]:
    titles = list(dict.fromkeys(run.title for run in runs))
    return {
        "title": " · ".join(titles[:MAX_TITLES]) + (f" · {len(titles) - MAX_TITLES} more" * (len(titles) > MAX_TITLES)),
        "runs": [_RunView(run) for run in runs],
        "comparison": compare(runs) if len(runs) > 1 else None,
    }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("offbeat.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"model_text": model_text, "line": one_line, "signed": words.signed}
    environment.filters |= {"duration": words.duration, "bytes": words.size, "capitalized": words.capitalized}
    environment.globals |= {"plot": lambda plot: Markup(draw(plot)), "chart_values": values, "METRICS": METRICS}
    return environment


def _resource(name: str) -> str:
    return files("offbeat.reports").joinpath(name).read_text(encoding="utf-8")


class _RunView:
    """The values that the template prints about one run."""

    max_completions = MAX_COMPLETIONS

    def __init__(self, run: RunRecord) -> None:
        self.run, self.history, self.config = run, run.history, run.config
        self.place = "" if run.path.resolve().name == run.name else run.path.resolve().name
        self.conclusion = conclusion(run)
        self.progress = progress(run)
        self.warn = run.state in (RunState.CRASHED, RunState.PAUSED) or bool(run.imbalance)
        self.began = str(run.environment.get("began", "unknown")).replace("T", " ").replace("+00:00", " UTC")
        self.tiles = _tiles(run)
        self.learning = list(curves.learning_plots(run))
        self.lag_and_drift = list(curves.lag_and_drift_plots(run))
        self.lag_rows = lag_rows(run)
        self.contrast, self.contrast_values = _contrast(run)
        self.fates = _shares({name: float(count) for name, count in run.fates().items()})
        self.fate_rows = fate_rows(run)
        self.bottleneck = bottleneck(run.history.seconds)
        self.phases = _shares(run.history.seconds)
        self.publish_sizes = publish_size_plot(run)
        self.improvement = curves.improvement_plot(run)
        self.publish_reasons = publish_reasons(run)
        self.events = merge_repeats(run.history.notable)
        self.before_after = before_and_after(run.groups) if run.groups else BeforeAfter("The log has no groups.", [])
        self.samples: list[GroupView] = run.groups.load(run.groups.sample()) if run.groups else []
        self.settings = _settings(run.config)
        self.parts = RunDirectory(run.path).part_sources()


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures at the top of a report: name, value, detail."""
    history = run.history
    tiles = [("step", f"{history.last_step}", f"of {run.steps}")]
    if history.evaluations and "pass@1" in history.evaluations[-1].estimates:
        value, low, high = history.evaluations[-1].estimates["pass@1"]
        tiles.append(("pass@1", f"{value:.3f}", f"{low:.3f} to {high:.3f} at step {history.evaluations[-1].step}"))
    lags = [lag for one in history.steps for lag in one.lags]
    if lags:
        tiles.append(("lag", f"{sum(lags) / len(lags):.1f}", f"mean; maximum {max(lags):.0f}"))
    elif history.steps:
        tiles.append(("lag", "unknown", "no group is of a version of this run"))
    if run.generates:
        published = words.size(sum(one.bytes for one in history.publishes))
        tiles.append(("publishes", f"{len(history.updates)}", f"{published} including version 0"))
    if run.groups is not None:
        trained, replayed = run.fates().get("trained", 0), sum(one.replayed for one in history.steps)
        again = f", {replayed} replays" if replayed else ""
        tiles.append(("groups", f"{run.groups.ledger.generated}", f"of this run; {trained} trained{again}"))
    tiles.append(("alarms", f"{history.alarms}", words.count(len(history.notable) - history.alarms, "other event")))
    tiles.append(("time", words.duration(history.wall), "from first to last event"))
    return tiles


def _contrast(run: RunRecord) -> tuple[Markup | None, str]:
    """Return the plot of all-pass, mixed and all-fail groups, and its values for the page's script."""
    ends, shares = contrast_shares(run.groups.columns) if run.groups else ([], [])
    if not ends:
        return None, ""
    drawn = draw_stack("All-pass, mixed and all-fail", "groups appended", ends, shares)
    named = zip(("all-pass", "mixed", "all-fail"), shares, strict=True)
    series = [Series(name, ends, share, style="area", color=color) for color, (name, share) in enumerate(named)]
    return Markup(drawn), values(Plot("Contrast", series, x_name="groups appended", y_range=(0, 1)))


def _shares(amounts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return name, amount and percentage, largest first."""
    total = sum(amounts.values()) or 1.0
    return sorted(((name, amount, 100 * amount / total) for name, amount in amounts.items()), key=lambda row: -row[1])


def _settings(config: Config) -> list[tuple[str, Json, bool]]:
    """Return every setting, its value, and True if it differs from the default."""
    default = Config().settings
    return [(key, value, value != default.get(key)) for key, value in config.settings.items()]


def _make_visible(value: object) -> object:
    """Escape control characters in every string that the template prints."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def model_text(text: str) -> Markup:
    """Return text from a model as safe HTML: truncated, with escaped characters highlighted.

    >>> model_text("<b>\\x1b[2J")
    Markup('&lt;b&gt;<i class="odd">\\\\x1b</i>[2J')
    """
    shown, removed = truncate(text, MAX_TEXT)
    parts = [
        escape(piece) if safe else Markup('<i class="odd">{}</i>').format(piece)
        for piece, safe in escaped_pieces(shown)
    ]
    if removed:
        parts.append(Markup(' <span class="cut">… {} more characters</span>').format(f"{removed:,}"))
    return Markup("").join(parts)


def one_line(text: object, limit: int = 300) -> str:
    """Return text on one line, truncated to `limit` characters.

    >>> one_line("a\\nb"), one_line("x" * 400, 3)
    ('a b', 'xxx …')
    """
    given = str(text)
    shown, removed = truncate(visible(given[:limit]).replace("\n", " "), limit)
    return f"{shown} …" if removed or len(given) > limit else shown
