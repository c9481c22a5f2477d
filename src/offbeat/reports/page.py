"""The report: one HTML file without scripts and without network requests.

The template escapes every value it prints: `visible` first, then Jinja's HTML escaping. Only plots are inserted
without escaping, and they contain no text from the model.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from offbeat import __version__
from offbeat.config import Config
from offbeat.metrics import METRICS
from offbeat.reports import panels, words
from offbeat.reports.comparison import compare, flatten
from offbeat.reports.groups import GroupView, contrast_shares
from offbeat.reports.history import RunState
from offbeat.reports.live import bottleneck
from offbeat.reports.plot import draw, draw_stack
from offbeat.reports.record import RunRecord
from offbeat.reports.words import escaped_pieces, truncate, visible
from offbeat.storage.files import write_atomically
from offbeat.types import Json

MAX_TEXT: Final = 700
"""Characters shown of a prompt or completion."""
MAX_COMPLETIONS: Final = 8


def write_report(paths: Sequence[Path], out: Path) -> str:
    """Write one page about these runs and return its conclusion. The file is replaced only when it is complete."""
    runs = [RunRecord.load(path) for path in paths]
    write_atomically(out, render(runs).encode(), durable=False)
    return words.conclusion(runs[0]) if len(runs) == 1 else compare(runs).conclusion


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML."""
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
    environment.globals |= {"plot": lambda plot: Markup(draw(plot)), "METRICS": METRICS}
    page = environment.get_template("page.html").render(
        style=Markup(files("offbeat.reports").joinpath("page.css").read_text(encoding="utf-8")),
        runs=[_RunView(run) for run in runs],
        comparison=compare(runs) if len(runs) > 1 else None,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )
    return page.lstrip()


class _RunView:
    """The values that the template prints about one run."""

    max_completions = MAX_COMPLETIONS

    def __init__(self, run: RunRecord) -> None:
        self.run, self.history, self.config = run, run.history, run.config
        self.conclusion = words.conclusion(run)
        self.progress = words.progress(run)
        self.warn = run.state in (RunState.CRASHED, RunState.PAUSED) or bool(run.imbalance)
        self.began = str(run.environment.get("began", "unknown")).replace("T", " ").replace("+00:00", " UTC")
        self.tiles = _tiles(run)
        self.learning = list(panels.learning_plots(run))
        self.lag_and_drift = list(panels.lag_and_drift_plots(run))
        self.lag_rows = panels.lag_rows(run)
        self.contrast = _contrast(run)
        self.fates = _shares({name: float(count) for name, count in run.fates().items()})
        self.fate_rows = panels.fate_rows(run)
        self.bottleneck = bottleneck(run.history.seconds)
        self.phases = _shares(run.history.seconds)
        self.publish_sizes = panels.publish_size_plot(run)
        self.publish_reasons = panels.publish_reasons(run)
        self.events = panels.merge_repeats(run.history.notable)
        self.samples: list[GroupView] = run.groups.load(run.groups.sample()) if run.groups else []
        self.settings = _settings(run.config)


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the figures at the top of a report: name, value, detail."""
    history = run.history
    tiles = [("step", f"{history.last_step}", f"of {run.config.steps}")]
    if history.evaluations and "pass@1" in history.evaluations[-1].estimates:
        value, low, high = history.evaluations[-1].estimates["pass@1"]
        tiles.append(("pass@1", f"{value:.3f}", f"{low:.3f} to {high:.3f} at step {history.evaluations[-1].step}"))
    lags = [lag for one in history.steps for lag in one.lags]
    if lags:
        tiles.append(("lag", f"{sum(lags) / len(lags):.1f}", f"mean; maximum {max(lags):.0f}"))
    published = words.size(sum(one.bytes for one in history.publishes))
    tiles.append(("publishes", f"{len(history.updates)}", f"{published} including version 0"))
    if run.groups is not None:
        trained = run.fates().get("trained", 0)
        tiles.append(("groups", f"{run.groups.ledger.generated}", f"generated; {trained} trained"))
    tiles.append(("alarms", f"{history.alarms}", words.count(len(history.notable) - history.alarms, "other event")))
    tiles.append(("time", words.duration(history.wall), "from first to last event"))
    return tiles


def _contrast(run: RunRecord) -> Markup | None:
    ends, shares = contrast_shares(run.groups.columns) if run.groups else ([], [])
    return Markup(draw_stack("All-pass, mixed and all-fail", "groups appended", ends, shares)) if ends else None


def _shares(amounts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return name, amount and percentage, largest first."""
    total = sum(amounts.values()) or 1.0
    return sorted(((name, amount, 100 * amount / total) for name, amount in amounts.items()), key=lambda row: -row[1])


def _settings(config: Config) -> list[tuple[str, Json, bool]]:
    """Return every setting, its value, and True if it differs from the default."""
    default = flatten(Config())
    return [(key, value, value != default.get(key)) for key, value in flatten(config).items()]


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
