"""Small plots as SVG that take their colours from the page, so that light and dark are one drawing.

A plot is drawn for about 400 pixels of width, the width of a column of the report and of a telephone: its text is
never scaled to where nobody can read it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

WIDTH: Final = 400
HEIGHT: Final = 210
TOP: Final = 14
BOTTOM: Final = 34
RIGHT: Final = 12
CHARACTER: Final = 6.3
"""Width of a digit at the size of tick labels."""
MOST_POINTS: Final = 300
MOST_MARKS: Final = 100
COLOURS: Final = 6

Style = Literal["line", "faint", "dots", "stems"]


@dataclass(frozen=True)
class Series:
    """One line, or points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Ends of intervals: a band around a line, whiskers on dots."""
    style: Style = "line"
    colour: int = 0

    def thinned(self) -> "Series":
        """With no more points than can be told apart; whiskers, which have no mean, are left out then."""
        if len(self.x) <= MOST_POINTS:
            return self
        x, y = thinned(self.x, self.y)
        ends = (self.low, self.high) if self.low and self.style != "dots" else ((), ())
        low, high = (thinned(self.x, one)[1] if one else () for one in ends)
        return replace(self, x=x, y=y, low=low, high=high)

    @property
    def paint(self) -> str:
        """Its classes; the seventh line has the first colour again, and dashes."""
        return f"{self.style} c{self.colour % COLOURS}" + (" dashed" if self.colour >= COLOURS else "")


@dataclass(frozen=True)
class Plot:
    """What a plot shows."""

    title: str
    series: Sequence[Series]
    note: str = ""
    """Below the title: what to read off it."""
    x_name: str = "step"
    marks: Sequence[float] = ()
    """Publishes: hairlines."""
    level: tuple[str, float] | None = None
    """A limit, with its name."""
    y_range: tuple[float, float] | None = None
    percent: bool = False

    @property
    def legend(self) -> list[Series]:
        """Series that need a name beside the title."""
        return list(self.series) if len(self.series) > 1 else []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(len(one.x) for one in self.series)

    @property
    def marked(self) -> bool:
        """Whether publishes can be told apart."""
        return 0 < len(self.marks) <= MOST_MARKS


@dataclass(frozen=True)
class Scale:
    """From values to pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float] = field(default_factory=tuple)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that span the range.

    >>> round_ticks(0.13, 0.92), round_ticks(0, 200), round_ticks(3, 3)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 50.0, 100.0, 150.0, 200.0], [3.0, 3.5, 4.0])
    """
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-90):  # all the same, but for rounding
        high = low + max(abs(low) / 3, 1e-90) if low else 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's label.

    >>> [short(v) for v in (0.0, 0.25, 1500.0, 2.5e6, -0.001)]
    ['0', '0.25', '1.5k', '2.5M', '−0.001']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most so many points: means of neighbours.

    >>> thinned([1, 2, 3, 4], [0.0, 1.0, 2.0, 4.0], most=2)
    ([1.5, 3.5], [0.5, 3.0])
    """
    size = math.ceil(len(x) / most)
    if size <= 1:
        return list(x), list(y)
    parts = [slice(start, start + size) for start in range(0, len(x), size)]
    return [sum(x[p]) / len(x[p]) for p in parts], [sum(y[p]) / len(y[p]) for p in parts]


def draw(plot: Plot) -> str:
    """The plot as an SVG element; every text in it is ours."""
    xs = [value for one in plot.series for value in one.x] + list(plot.marks)
    ys = [value for one in plot.series for value in (*one.y, *_ends(one))] + ([plot.level[1]] if plot.level else [])
    low, high = plot.y_range or (min(ys), max(ys))
    ticks = round_ticks(low, high)
    labels = [f"{100 * tick:.4g} %" if plot.percent else short(tick) for tick in ticks]
    left = 10 + CHARACTER * max(map(len, labels))
    y = Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, ticks)
    x_ticks = [tick for tick in round_ticks(min(xs), max(xs), 5) if min(xs) <= tick <= max(xs)]
    x = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, left + 4, WIDTH - RIGHT, x_ticks)
    parts = [*_axes(x, y, labels, left, plot.x_name)]
    if plot.marked:
        parts += [f'<path class="mark" d="M{x(at):.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for at in plot.marks]
    if plot.level is not None:
        parts.append(f'<path class="level" d="M{left:.1f} {y(plot.level[1]):.1f}H{WIDTH - RIGHT}"/>')
    for one in plot.series:
        parts += _drawn(one.thinned(), x, y)
    label = f"{plot.title}, by {plot.x_name}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_plain(label)}">{"".join(parts)}</svg>'


def _ends(series: Series) -> list[float]:
    """Of intervals, as far as they may widen the plot: no more than the values' own range once more."""
    if not series.low or not series.y:
        return []
    low, high = min(series.y), max(series.y)
    room = (high - low) or 1.0
    floor = 0.0 if low >= 0 else low - room  # no interval makes a share or a count negative
    return [max(min(series.low), floor, low - room), min(max(series.high), high + room)]


def _axes(x: Scale, y: Scale, labels: Sequence[str], left: float, x_name: str) -> Iterator[str]:
    for tick, label in zip(y.ticks, labels, strict=True):
        yield f'<path class="grid" d="M{left:.1f} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="end" x="{left - 5:.1f}" y="{y(tick) + 4:.1f}">{label}</text>'
    end = 0.0
    for tick in x.ticks:
        half = CHARACTER * len(short(tick)) / 2
        if x(tick) + half <= WIDTH and x(tick) - half >= end:
            yield f'<text class="middle" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 15}">{short(tick)}</text>'
            end = x(tick) + half + 8
    yield f'<text class="end name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}">{_plain(x_name)}</text>'


def _drawn(series: Series, x: Scale, y: Scale) -> list[str]:
    def inside(value: float) -> float:
        return min(max(y(value), TOP - 1), HEIGHT - BOTTOM + 1)

    if series.style == "stems":
        return _stems(series, x, y)
    if series.style == "dots":
        return _dots(series, x, inside)
    parts = []
    if series.low:
        there = [*zip(series.x, series.high, strict=True), *reversed([*zip(series.x, series.low, strict=True)])]
        parts.append(f'<path class="band {series.paint}" d="M{_path(there, x, inside)}Z"/>')
    points = [*zip(series.x, series.y, strict=True)]
    parts.append(f'<path class="{series.paint}" d="M{_path(points, x, inside)}"/>')
    return parts


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Callable[[float], float]) -> str:
    return "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def _dots(series: Series, x: Scale, inside: Callable[[float], float]) -> list[str]:
    parts = []
    for place, (a, b) in enumerate(zip(series.x, series.y, strict=True)):
        if series.low:
            ends = f"M{x(a):.1f} {inside(series.low[place]):.1f}V{inside(series.high[place]):.1f}"
            parts.append(f'<path class="whisker c{series.colour % COLOURS}" d="{ends}"/>')
        parts.append(f'<circle class="{series.paint}" cx="{x(a):.1f}" cy="{inside(b):.1f}" r="3"/>')
    return parts


def _stems(series: Series, x: Scale, y: Scale) -> list[str]:
    path = "".join(f"M{x(a):.1f} {y(max(0.0, y.low)):.1f}V{y(b):.1f}" for a, b in zip(series.x, series.y, strict=True))
    return [f'<path class="{series.paint}" d="{path}"/>']


def draw_stack(title: str, x_name: str, ends: Sequence[float], shares: Sequence[Sequence[float]]) -> str:
    """Shares that add up to one, part by part, as areas on top of each other; the first is at the bottom."""
    left = 10 + CHARACTER * 5
    x = Scale(0, ends[-1], left + 4, WIDTH - RIGHT, [t for t in round_ticks(0, ends[-1], 5) if t <= ends[-1]])
    y = Scale(0, 1, HEIGHT - BOTTOM, TOP, [0, 0.5, 1])
    parts = []
    floor = [0.0] * len(ends)
    for number, share in enumerate(shares):
        roof = [a + b for a, b in zip(floor, share, strict=True)]
        starts = [0.0, *ends[:-1]]
        steps = [(at, level) for a, b, level in zip(starts, ends, roof, strict=True) for at in (a, b)]
        back = [(at, level) for a, b, level in zip(starts, ends, floor, strict=True) for at in (a, b)]
        parts.append(f'<path class="area s{number}" d="M{_path([*steps, *reversed(back)], x, y)}Z"/>')
        floor = roof
    parts += _axes(x, y, ["0 %", "50 %", "100 %"], left, x_name)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_plain(title)}">{"".join(parts)}</svg>'


def _plain(text: str) -> str:
    return "".join(c for c in text if c.isalnum() or c in " .,:@-–/%")
