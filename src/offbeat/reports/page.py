"""The report: one HTML file that makes no network requests. Its one script shows values under the pointer.

The template escapes every value it prints: `visible` first, then Jinja's HTML escaping. Only plots are inserted
without escaping, and they contain no text from the model.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from offbeat import __version__, words
from offbeat.config import Config
from offbeat.metrics import METRICS
from offbeat.reports import curves, panels, sentences
from offbeat.reports.before_after import BeforeAfter, before_and_after
from offbeat.reports.comparison import compare
from offbeat.reports.groups import GroupView, contrast_shares
from offbeat.reports.history import RunState
from offbeat.reports.live import bottleneck
from offbeat.reports.plot import Plot, Series, draw, draw_stack, values
from offbeat.reports.pools import name_runs
from offbeat.reports.record import RunRecord
from offbeat.run.directory import RunDirectory
from offbeat.storage.files import write_atomically
from offbeat.types import Json
from offbeat.words import escaped_pieces, truncate, visible

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
        return sentences.conclusion(runs[0])
    compared = compare(runs)
    return "\n".join([compared.conclusion, *compared.differences])


def render(runs: Sequence[RunRecord], *, live: str = "") -> str:
    """Return the page as HTML. A live page asks its server for news; `live` identifies the state that it shows."""
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Only this script may run: text of a model that reached the page as HTML would still do nothing.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    page = (
        _environment()
        .get_template("page.html")
        .render(
            **_content(runs),
            policy=policy + ("; connect-src 'self'" if live else ""),
            style=Markup(_resource("page.css")),
            script=Markup(script),
            live=live,
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            version=__version__,
        )
    )
    return page.lstrip()


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
        self.conclusion = sentences.conclusion(run)
        self.progress = sentences.progress(run)
        self.warn = run.state in (RunState.CRASHED, RunState.PAUSED) or bool(run.imbalance)
        self.began = str(run.environment.get("began", "unknown")).replace("T", " ").replace("+00:00", " UTC")
        self.tiles = _tiles(run)
        self.learning = list(curves.learning_plots(run))
        self.lag_and_drift = list(curves.lag_and_drift_plots(run))
        self.lag_rows = panels.lag_rows(run)
        self.contrast, self.contrast_values = _contrast(run)
        self.fates = _shares({name: float(count) for name, count in run.fates().items()})
        self.fate_rows = panels.fate_rows(run)
        self.bottleneck = bottleneck(run.history.seconds)
        self.phases = _shares(run.history.seconds)
        self.publish_sizes = panels.publish_size_plot(run)
        self.improvement = curves.improvement_plot(run)
        self.publish_reasons = panels.publish_reasons(run)
        self.events = panels.merge_repeats(run.history.notable)
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
