"""The report: one HTML file without scripts that asks the network for nothing.

Everything printed goes through `visible`, then through Jinja's escaping: there is no expression in the template that
model text could pass unharmed. Only plots, whose text is ours, are put in as they are.
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
from offbeat.report import comparison, panels, words
from offbeat.report.comparison import flat, pooled
from offbeat.report.groups import Shown, contrast
from offbeat.report.history import RunState
from offbeat.report.live import verdict
from offbeat.report.plot import Plot, draw, draw_stack
from offbeat.report.record import RunRecord
from offbeat.report.words import cut, pieces, visible
from offbeat.types import Json

MOST_TEXT: Final = 700
"""Characters of a prompt or completion that are shown."""
MOST_ANSWERS: Final = 8


def write_report(paths: Sequence[Path], out: Path) -> str:
    """One page about these runs, which appears when it is complete; returns its conclusion."""
    runs = [RunRecord.of(path) for path in paths]
    part = out.with_name(out.name + ".part")
    part.write_text(render(runs), encoding="utf-8")
    part.replace(out)
    return words.conclusion(runs[0]) if len(runs) == 1 else compared(runs).conclusion


def compared(runs: Sequence[RunRecord]) -> comparison.Comparison:
    """Several runs, seeds pooled."""
    return comparison.compare(pooled([(run.name, run.config, run) for run in runs]))


def render(runs: Sequence[RunRecord]) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("offbeat.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"model_text": model_text, "line": one_line, "signed": words.signed}
    environment.filters |= {"duration": words.duration, "bytes": words.size}
    environment.globals |= {"plot": _plot, "METRICS": METRICS}
    page = environment.get_template("page.html").render(
        style=Markup(files("offbeat.report").joinpath("page.css").read_text(encoding="utf-8")),
        runs=[_RunView(run) for run in runs],
        several=compared(runs) if len(runs) > 1 else None,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )
    return page.lstrip()


class _RunView:
    """A run as the template asks for it."""

    def __init__(self, run: RunRecord) -> None:
        self.run, self.history, self.config = run, run.history, run.config
        self.conclusion = words.conclusion(run)
        self.standing = words.standing(run)
        self.warn = run.state in (RunState.BROKEN_OFF, RunState.PAUSED) or bool(run.imbalance)
        self.learning = list(panels.learning(run))
        self.lag_and_drift = list(panels.lag_and_drift(run))
        self.by_lag = panels.by_lag(run)
        self.sync = panels.sync_bytes(run)
        self.reasons, self.fared = panels.reasons(run), panels.fared(run)
        self.notes = panels.told(run.history.notes)
        self.verdict = verdict(run.history.seconds)
        self.phases = _shares(run.history.seconds)
        self.fates = _shares({name: float(count) for name, count in run.fates().items()})
        self.settings = _settings(run.config)
        self.samples: list[Shown] = run.groups.show(run.groups.sample()) if run.groups else []

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """The figures at the top: name, value, and what it is out of."""
        return _tiles(self.run)

    @property
    def contrast(self) -> Markup | None:
        """All-pass, mixed, all-fail."""
        if self.run.groups is None or not (found := contrast(self.run.groups.columns)).ends:
            return None
        shares = (found.all_pass, found.mixed, found.all_fail)
        return Markup(draw_stack("All-pass, mixed and all-fail", "groups appended", found.ends, shares))

    @property
    def began(self) -> str:
        """When, without the letters of the standard."""
        return str(self.run.environment.get("began", "at a time unknown")).replace("T", " ").replace("+00:00", " UTC")

    @property
    def answers_shown(self) -> int:
        """Of each group."""
        return MOST_ANSWERS


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    history, last = run.history, run.history.evaluations[-1] if run.history.evaluations else None
    tiles = [("step", f"{history.last_step}", f"of {run.config.steps}")]
    if last is not None and "pass@1" in last.estimates:
        value, low, high = last.estimates["pass@1"]
        tiles.append(("pass@1", f"{value:.3f}", f"{low:.3f} to {high:.3f} at step {last.step}"))
    lags = [lag for one in history.steps for lag in one.lags]
    if lags:
        tiles.append(("lag", f"{sum(lags) / len(lags):.1f}", f"mean; largest {max(lags):.0f}"))
    publishes = [one for one in history.publishes if one.version > 0]
    bytes_sent = words.size(sum(one.bytes for one in history.publishes))
    tiles.append(("publishes", f"{len(publishes)}", f"{bytes_sent} with the first"))
    if run.groups is not None:
        tiles.append(("groups", f"{run.groups.ledger.generated}", f"{run.fates().get('trained', 0)} trained on"))
    alarms = sum(one.kind.startswith("alarm") for one in history.notes)
    tiles.append(("alarms", f"{alarms}", f"{len(history.notes) - alarms} other events"))
    tiles.append(("time", words.duration(history.wall), "from first to last event"))
    return tiles


def _shares(amounts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Name, amount and share of each, the largest first."""
    total = sum(amounts.values()) or 1.0
    return sorted(((name, amount, 100 * amount / total) for name, amount in amounts.items()), key=lambda row: -row[1])


def _settings(config: Config) -> list[tuple[str, Json, bool]]:
    """Every knob, its value, and whether it differs from the default."""
    default = flat(Config())
    return [(key, value, value != default.get(key)) for key, value in flat(config).items()]


def _plot(plot: Plot) -> Markup:
    return Markup(draw(plot))


def _harmless(value: object) -> object:
    """Of everything the template prints: what would act or hide is spelled out."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def model_text(text: str) -> Markup:
    """A stranger's text as HTML, what is not plain set apart, and no more than a person would read.

    >>> model_text("<b>\\x1b[2J")
    Markup('&lt;b&gt;<i class="odd">\\\\x1b</i>[2J')
    """
    shown, left_out = cut(text, MOST_TEXT)
    parts = [
        escape(piece) if plain else Markup('<i class="odd">{}</i>').format(piece) for piece, plain in pieces(shown)
    ]
    if left_out:
        parts.append(Markup(' <span class="cut">… {} more characters</span>').format(f"{left_out:,}"))
    return Markup("").join(parts)


def one_line(text: object, most: int = 300) -> str:
    """Short, and on one line.

    >>> one_line("a\\nb"), one_line("x" * 400, 3)
    ('a b', 'xxx …')
    """
    given = str(text)
    shown, left_out = cut(visible(given[:most]).replace("\n", " "), most)
    return f"{shown} …" if left_out or len(given) > most else shown
