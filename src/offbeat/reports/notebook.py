"""The live view in a notebook: a table and curves in the output of the cell, updated in place. Needs no widgets."""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rich.console import Console, RenderableType

from offbeat.events import EventKind
from offbeat.reports.chart import Chart
from offbeat.reports.plot import Plot, Series, standalone
from offbeat.types import Json

CURVES: Final = {
    "reward_mean": "reward",
    "completion_length": "completion length",
    "entropy": "entropy",
    "drift_tv_token": "drift",
}
"""The metrics that are drawn, with their titles; a metric that a run does not measure is left out."""
LEAST_SECONDS: Final = 1.0
"""Between two drawings, so that a run of short steps is not slowed down."""


@dataclass
class NotebookDisplay:
    """One output of a notebook cell that is updated in place."""

    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Step and value of each curve."""
    _drawn_at: float = 0.0

    def __post_init__(self) -> None:
        from IPython import display

        self._display: Any = display
        self._handle = self._display.display(self._display.HTML(""), display_id=True)

    def add(self, event: Mapping[str, Json]) -> None:
        """Take the values of an event."""
        step = float(cast(int, event["step"]))
        metrics = cast(dict[str, float | None], event.get("metrics", {})) if event["kind"] == EventKind.STEP else {}
        for name in CURVES:
            if (value := metrics.get(name)) is not None:
                self.points.setdefault(name, []).append((step, value))
        if event["kind"] == EventKind.EVALUATED and "pass@1" in event:
            self.points.setdefault("pass@1", []).append((step, cast(list[float], event["pass@1"])[0]))

    def update(self, screen: RenderableType, *, last: bool = False) -> None:
        """Show the table and the curves; not more often than once a second, except for the last time."""
        if not last and time.monotonic() - self._drawn_at < LEAST_SECONDS:
            return
        self._drawn_at = time.monotonic()
        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False)
        console.print(screen)
        table = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        self._handle.update(self._display.HTML(table + "".join(chart._repr_html_() for chart in self.charts())))

    def charts(self) -> list[Chart]:
        """Return one chart for each curve that has a line to draw; the pass rate is drawn with the reward."""
        found = []
        for name, title in CURVES.items():
            names = [name, "pass@1"] if name == "reward_mean" else [name]
            series = [
                Series(one, [x for x, _ in self.points[one]], [y for _, y in self.points[one]], color=number)
                for number, one in enumerate(names)
                if len(self.points.get(one, ())) > 1
            ]
            if series:
                found.append(Chart(standalone(Plot(title, series))))
        return found
