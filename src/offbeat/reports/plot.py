"""Small SVG plots. Colors come from the page's CSS, so one drawing works in light and dark mode.

A plot is about 400 pixels wide, like a column of the report and like a phone, so its text is never scaled down. The
drawing needs no script; `values` is what the script of the page reads to show values under the pointer.
"""

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from offbeat.types import Json
from offbeat.words import visible

WIDTH: Final = 400
HEIGHT: Final = 210
TOP: Final = 14
BOTTOM: Final = 34
RIGHT: Final = 12
CHAR_WIDTH: Final = 6.3
"""Width of a digit in a tick label."""
MAX_POINTS: Final = 300
MAX_MARKS: Final = 100
COLORS: Final = 6

Style = Literal["line", "faint", "dots", "stems", "area"]


@dataclass(frozen=True)
class Series:
    """One curve or set of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Ends of the intervals: a band around a line, whiskers on dots."""
    style: Style = "line"
    color: int = 0

    def downsampled(self) -> "Series":
        """Return the series with at most `MAX_POINTS` points. Whiskers cannot be averaged and are dropped."""
        if len(self.x) <= MAX_POINTS:
            return self
        x, y = downsample(self.x, self.y)
        ends = (self.low, self.high) if self.low and self.style != "dots" else ((), ())
        low, high = (downsample(self.x, one)[1] if one else () for one in ends)
        return replace(self, x=x, y=y, low=low, high=high)

    @property
    def css_class(self) -> str:
        """CSS classes. Series 7 to 12 reuse the six colors with dashes."""
        if self.style == "area":
            return f"s{self.color % COLORS}"
        return f"{self.style} c{self.color % COLORS}" + (" dashed" if self.color >= COLORS else "")


@dataclass(frozen=True)
class Plot:
    """A titled plot of one or more series."""

    title: str
    series: Sequence[Series]
    note: str = ""
    """Text below the plot: what it shows and what to look at."""
    x_name: str = "step"
    marks: Sequence[float] = ()
    """Thin vertical lines, one for each publish."""
    level: float | None = None
    """A dashed horizontal line."""
    y_range: tuple[float, float] | None = None

    @property
    def legend(self) -> list[Series]:
        return list(self.series) if len(self.series) > 1 else []

    @property
    def is_empty(self) -> bool:
        return not any(len(one.x) for one in self.series)

    @property
    def shows_marks(self) -> bool:
        """True if there are marks, and few enough to distinguish."""
        return 0 < len(self.marks) <= MAX_MARKS


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that span the range.

    >>> round_ticks(0.13, 0.92), round_ticks(0, 200), round_ticks(3, 3)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 50.0, 100.0, 150.0, 200.0], [3.0, 3.5, 4.0])
    """
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-90):  # equal up to rounding
        high = low + max(abs(low) / 3, 1e-90) if low else 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


def tick_label(value: float) -> str:
    """Return a short label with a unit prefix.

    >>> [tick_label(v) for v in (0.0, 0.25, 1500.0, 2.5e6, -0.001)]
    ['0', '0.25', '1.5k', '2.5M', '−0.001']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def downsample(x: Sequence[float], y: Sequence[float], most: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Average neighboring points until at most `most` are left.

    >>> downsample([1, 2, 3, 4], [0.0, 1.0, 2.0, 4.0], most=2)
    ([1.5, 3.5], [0.5, 3.0])
    """
    size = math.ceil(len(x) / most)
    if size <= 1:
        return list(x), list(y)
    parts = [slice(start, start + size) for start in range(0, len(x), size)]
    return [sum(x[p]) / len(x[p]) for p in parts], [sum(y[p]) / len(y[p]) for p in parts]


@dataclass(frozen=True)
class Frame:
    """Where the values of a plot are in its drawing."""

    x: Scale
    y: Scale
    labels: Sequence[str]
    """The labels of the ticks of y."""
    left: float


def frame(plot: Plot) -> Frame:
    """Choose scales and ticks that hold all series, marks and the level of a plot."""
    xs = [value for one in plot.series for value in one.x] + list(plot.marks)
    ys = [value for one in plot.series for value in (*one.y, *_interval_ends(one))]
    ys += [] if plot.level is None else [plot.level]
    low, high = plot.y_range or (min(ys), max(ys))
    constant = 0 < low <= high <= low * (1 + 1e-9)  # drawn above 0, not on the axis
    ticks = round_ticks(0.0 if constant else low, high)
    labels = [tick_label(tick) for tick in ticks]
    left = 10 + CHAR_WIDTH * max(map(len, labels))
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, ticks)
    x_ticks = [tick for tick in round_ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs)]
    x = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, left + 4, WIDTH - RIGHT, x_ticks)
    return Frame(x, y, labels, left)


def draw(plot: Plot) -> str:
    """Return the plot as an SVG element. It contains no text from the model."""
    place = frame(plot)
    x, y, left = place.x, place.y, place.left
    parts = [*_axes(x, y, place.labels, left, plot.x_name)]
    if plot.shows_marks:
        parts += [f'<path class="mark" d="M{x(at):.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for at in plot.marks]
    if plot.level is not None:
        parts.append(f'<path class="level" d="M{left:.1f} {y(plot.level):.1f}H{WIDTH - RIGHT}"/>')
    for one in plot.series:
        parts += _draw_series(one.downsampled(), x, y)
    return _svg(f"{plot.title}, by {plot.x_name}", parts)


def values(plot: Plot) -> str:
    """Return as JSON what the page's script needs to show values: the scales, and every point that is drawn.

    >>> one = json.loads(values(Plot("Reward", [Series("mean", [1, 2], [0.25, 0.5])])))
    >>> one["name"], one["series"][0]["y"], one["x"][:2]
    ('step', [0.25, 0.5], [1, 2])
    """
    place = frame(plot)
    series = []
    for one in plot.series:
        shown = one.downsampled()
        numbers = {"x": shown.x, "y": shown.y, "low": shown.low, "high": shown.high}
        kept: dict[str, Json] = {name: [_short(value) for value in some] for name, some in numbers.items() if some}
        each = math.ceil(len(one.x) / MAX_POINTS)
        series.append({"name": visible(one.name), "key": f"key {one.css_class}", "each": each, **kept})
    scales = {name: [scale.low, scale.high, scale.start, scale.end] for name, scale in (("x", place.x), ("y", place.y))}
    return json.dumps({"name": plot.x_name, **scales, "series": series}, separators=(",", ":"))


def _short(value: float) -> float:
    """Keep six digits, as many as anyone reads."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_plain(label)}">{"".join(parts)}</svg>'


def _interval_ends(series: Series) -> list[float]:
    """Return the ends of the intervals; they extend the plot by at most the range of the values on either side."""
    if not series.low or not series.y:
        return []
    low, high = min(series.y), max(series.y)
    room = (high - low) or 1.0
    floor = 0.0 if low >= 0 else low - room  # an interval does not make a share or a count negative
    return [max(min(series.low), floor, low - room), min(max(series.high), high + room)]


def _axes(x: Scale, y: Scale, labels: Sequence[str], left: float, x_name: str) -> Iterator[str]:
    for tick, label in zip(y.ticks, labels, strict=True):
        yield f'<path class="grid" d="M{left:.1f} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="end" x="{left - 5:.1f}" y="{y(tick) + 4:.1f}">{label}</text>'
    end = 0.0
    for tick in x.ticks:
        half = CHAR_WIDTH * len(tick_label(tick)) / 2
        if x(tick) + half <= WIDTH and x(tick) - half >= end:
            yield f'<text class="middle" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 15}">{tick_label(tick)}</text>'
            end = x(tick) + half + 8
    yield f'<text class="end name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">{_plain(x_name)}</text>'


def _draw_series(series: Series, x: Scale, y: Scale) -> list[str]:
    def inside(value: float) -> float:
        return min(max(y(value), TOP - 1), HEIGHT - BOTTOM + 1)

    if series.style == "stems":
        return _stems(series, x, y)
    if series.style == "dots":
        return _dots(series, x, inside)
    parts = []
    if series.low:
        outline = [*zip(series.x, series.high, strict=True), *reversed([*zip(series.x, series.low, strict=True)])]
        parts.append(f'<path class="band {series.css_class}" d="M{_path(outline, x, inside)}Z"/>')
    points = [*zip(series.x, series.y, strict=True)]
    parts.append(f'<path class="{series.css_class}" d="M{_path(points, x, inside)}"/>')
    return parts


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Callable[[float], float]) -> str:
    return "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def _dots(series: Series, x: Scale, inside: Callable[[float], float]) -> list[str]:
    parts = []
    for number, (a, b) in enumerate(zip(series.x, series.y, strict=True)):
        if series.low:
            ends = f"M{x(a):.1f} {inside(series.low[number]):.1f}V{inside(series.high[number]):.1f}"
            parts.append(f'<path class="whisker c{series.color % COLORS}" d="{ends}"/>')
        parts.append(f'<circle class="{series.css_class}" cx="{x(a):.1f}" cy="{inside(b):.1f}" r="3"/>')
    return parts


def _stems(series: Series, x: Scale, y: Scale) -> list[str]:
    path = "".join(f"M{x(a):.1f} {y(max(0.0, y.low)):.1f}V{y(b):.1f}" for a, b in zip(series.x, series.y, strict=True))
    return [f'<path class="{series.css_class}" d="{path}"/>']


def draw_stack(title: str, x_name: str, ends: Sequence[float], shares: Sequence[Sequence[float]]) -> str:
    """Return stacked areas of shares that add up to 1, with the first share at the bottom."""
    left = 10 + CHAR_WIDTH * 5
    x = Scale(0, ends[-1], left + 4, WIDTH - RIGHT, [t for t in round_ticks(0, ends[-1], 5) if t <= ends[-1]])
    y = Scale(0, 1, HEIGHT - BOTTOM, TOP, [0, 0.5, 1])
    parts = []
    lower = [0.0] * len(ends)
    for number, share in enumerate(shares):
        upper = [a + b for a, b in zip(lower, share, strict=True)]
        starts = [0.0, *ends[:-1]]
        steps = [(at, level) for a, b, level in zip(starts, ends, upper, strict=True) for at in (a, b)]
        back = [(at, level) for a, b, level in zip(starts, ends, lower, strict=True) for at in (a, b)]
        parts.append(f'<path class="area s{number}" d="M{_path([*steps, *reversed(back)], x, y)}Z"/>')
        lower = upper
    parts += _axes(x, y, ["0 %", "50 %", "100 %"], left, x_name)
    return _svg(title, parts)


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isalnum() or c in " .,:@-–/%")


def standalone(plot: Plot) -> str:
    """Return the plot as a separate SVG file with the page's colors, the title and the names of the series."""
    css = files("offbeat.reports").joinpath("page.css").read_text(encoding="utf-8")
    style = "".join(line for line in css.partition("* {")[0].splitlines()) + "".join(
        line.removeprefix("svg ")
        for line in css.splitlines()
        if line.startswith(("svg text", "svg .", "svg path", ".c"))
    )
    names = [
        f'<tspan class="c{one.color % COLORS}" fill="currentColor">{escape(one.name)}</tspan>' for one in plot.series
    ]
    title = f'<text x="10" y="20">{escape(plot.title)}: {" · ".join(names)}</text>'
    drawing = draw(plot).replace("<svg ", f'<svg y="24" width="{WIDTH}" height="{HEIGHT}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 24}" width="{2 * WIDTH}">'
        f"<style>{style} svg {{ color: var(--ink); font-family: system-ui, sans-serif }}</style>"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{title}{drawing}</svg>'
    )


@dataclass(frozen=True)
class Chart:
    """A plot as SVG. A notebook shows it; `save` writes it to a file."""

    svg: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the SVG file and return its path."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        # As an image, because styles inside an SVG would apply to the whole notebook.
        return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}">'
