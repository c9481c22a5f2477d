"""The live view of a run: a screen that updates in place in a terminal or notebook, plain lines elsewhere."""

import io
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from offbeat.config import Config
from offbeat.events import TROUBLE, EventKind
from offbeat.run.journal import Phase
from offbeat.types import Json
from offbeat.working import TICK, Working

LEAST_SECONDS: Final = 1.0
"""Between two drawings, so that a run of short steps is not slowed down."""


@dataclass
class NotebookDisplay:
    """One output of a notebook cell that is updated in place."""

    _drawn_at: float = 0.0

    def __post_init__(self) -> None:
        from IPython import display

        self._display: Any = display
        self._handle = self._display.display(self._display.HTML(""), display_id=True)

    def update(self, screen: RenderableType, *, last: bool = False) -> None:
        """Show the table; not more often than once a second, except for the last time."""
        if not last and time.monotonic() - self._drawn_at < LEAST_SECONDS:
            return
        self._drawn_at = time.monotonic()
        console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False)
        console.print(screen)
        table = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        self._handle.update(self._display.HTML(table))


BARS: Final = "▁▂▃▄▅▆▇█"
PHASES: Final = {
    Phase.GROUPS: "generating",
    Phase.PUBLISHING: "publishing the new version",
    Phase.SAVING: "saving a checkpoint",
    Phase.ENDING: "closing the engines",
}
"""Phases of the loop in other words than their own."""


def sparkline(values: list[float], width: int = 40) -> str:
    """Draw the last values as bars, scaled from their minimum to their maximum.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def bottleneck(seconds: Mapping[str, float]) -> str:
    """Return the phase that takes most of the time, in words.

    >>> bottleneck({"waiting for groups": 70.0, "training": 25.0, "the loop itself": 5.0})
    'generation-bound: the trainer waits for groups 70 % of the time'
    """
    total = sum(seconds.values())
    if not total:
        return "no time measured yet"
    phase, most = max(seconds.items(), key=lambda item: item[1])
    share = f"{100 * most / total:.0f} % of the time"
    if phase == Phase.GROUPS:
        return f"generation-bound: the trainer waits for groups {share}"
    if phase == Phase.TRAINING:
        return f"training-bound: updates take {share}"
    return f"{phase} takes {share}"


@dataclass
class LiveView:
    """Shows the state of the run. Call it with every journal event."""

    config: Config
    console: Console
    phase: Callable[[], Phase | None] = lambda: None
    """What the loop is doing; None before it begins."""
    rewards: list[float] = field(default_factory=list)
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    step: Mapping[str, Json] = field(default_factory=dict)
    """The last `step` event."""
    published: int = 0
    pass_rate: str = ""
    _doing: str = "loading the model"
    _live: Live | NotebookDisplay | None = None
    _working: Working | None = None
    _news: float = field(default_factory=time.monotonic)
    """When the last event came."""
    _printed: float = 0.0
    """When the last line of a step was printed."""

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
            self._live.__enter__()
        elif self.console.is_jupyter and not self.console.quiet:
            self._live = NotebookDisplay()
        elif not self.console.quiet:
            self._working = Working(self.doing, after=TICK)  # asks again for each dot
            self._working.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._live, Live):
            self._live.__exit__(None, None, None)
        if isinstance(self._live, NotebookDisplay):
            self._live.update(self.render(), last=True)
        if self._working is not None:
            self._working.__exit__(None, None, None)

    def __call__(self, event: Mapping[str, Json]) -> None:
        kind = event["kind"]
        if kind == EventKind.STEP:
            self.step = event
            if (reward := self._metric("reward_mean")) is not None:
                self.rewards.append(reward)
        elif kind == EventKind.PUBLISHED:
            self.published = cast(int, event["version"])
        elif kind == EventKind.EVALUATED and "pass@1" in event:
            value, low, high = cast(list[float], event["pass@1"])
            seen = " on training prompts" if event.get("held_out") is False else ""
            self.pass_rate = f"{value:.3f} [{low:.3f}, {high:.3f}] at step {event.get('version', event['step'])}{seen}"
        elif kind == EventKind.ALARM:
            self.warnings.append(f"step {event['step']}: {event['says']}")
        elif kind in TROUBLE:
            self.warnings.append(f"step {event['step']}: {kind}: {event.get('why', event.get('worker', ''))}"[:200])
        self._show(event)

    def doing(self) -> str:
        """Return what the run does now, in words."""
        phase = self.phase()
        if phase is not None and phase is not Phase.ITSELF:  # the loop itself is between two other phases
            offline = phase is Phase.GROUPS and self.config.run.mode == "offline"
            self._doing = "reading the log" if offline else PHASES.get(phase, str(phase))
        return self._doing

    def _show(self, event: Mapping[str, Json]) -> None:
        before, self._news = self._news, time.monotonic()
        if isinstance(self._live, Live):
            self._live.refresh()
        elif self._live is not None:
            self._live.update(self.render())
        elif (line := self.line(event)) and self._is_time(event, self._news - before):
            if self._working is not None:
                self._working.make_room()
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _is_time(self, event: Mapping[str, Json], seconds: float) -> bool:
        """Return False for a step whose line the next one can replace, if that comes as soon as this one did."""
        if event["kind"] != EventKind.STEP:
            return True
        if self._news - self._printed + seconds < TICK and event["step"] != self.config.steps:
            return False
        self._printed = self._news
        return True

    def line(self, event: Mapping[str, Json]) -> str:
        """Return an event as one plain line, or an empty string for events that are not shown."""
        step, kind = event["step"], event["kind"]
        if kind == EventKind.STEP:
            return (
                f"step {step}/{self.config.steps}  reward {self._shown('reward_mean', '.3f')}  lag {self._lag()}  "
                f"drift {self._drift()}" + (f"  replayed {event['replayed']}" if event.get("replayed") else "")
            )
        if kind == EventKind.PUBLISHED:
            return f"step {step}  published version {event['version']} ({event['why']}, {event.get('bytes', 0)} bytes)"
        if kind == EventKind.EVALUATED:
            return f"step {step}  pass@1 {self.pass_rate}"
        if kind == EventKind.ESTIMATED:
            return f"memory: {str(event['memory']).splitlines()[0]}"
        if kind in (EventKind.WORKER_JOINED, EventKind.WORKER_LEFT, EventKind.WORKER_READY):
            return f"step {step}  {kind}: {event['worker']}"
        if kind in TROUBLE or kind in (EventKind.ALARM, EventKind.RESUMED):
            text = event.get("says", event.get("why", ""))
            return f"step {step}  {kind}" + (f": {text}" if text else "")
        return ""

    def render(self) -> RenderableType:
        """Return the screen: one row per quantity, then the last warnings."""
        table = Table.grid(padding=(0, 2))
        step = cast(int, self.step.get("step", 0))
        table.add_row("step", f"{step} of {self.config.steps}")
        table.add_row("", ProgressBar(total=self.config.steps, completed=step, width=40))
        if self.rewards:
            table.add_row("reward", f"{self.rewards[-1]:.3f}  {sparkline(self.rewards)}")
        if self.pass_rate:
            table.add_row("pass@1", self.pass_rate)
        limit = f" (fresh groups at most {self.config.fresh_lag})" if self.config.run.mode != "offline" else ""
        table.add_row("lag", self._lag() + limit)
        budget = self.config.sync.drift_budget
        table.add_row("drift", self._drift() + (f" (budget {budget:g})" if budget else ""))
        due = f"at step {self.published + self.config.longest}"
        if budget is not None:
            due = f"when drift reaches its budget, {due} at the latest"
        elif self.config.sync.by_cost:
            due = f"when lag has cost more than a publish, {due} at the latest"
        if self.config.run.mode != "offline":
            table.add_row("sync", f"version {self.published} published; next {due}")
        seconds = cast(dict[str, float], self.step.get("seconds", {}))
        total = sum(seconds.values()) or 1.0
        shares = ", ".join(f"{name} {100 * spent / total:.0f} %" for name, spent in seconds.items() if spent)
        table.add_row("time", f"{shares}\n{bottleneck(seconds)}")
        if (silent := time.monotonic() - self._news) > TICK:
            table.add_row("now", f"{self.doing()}, {silent:.0f} s")
        for warning in self.warnings:
            table.add_row("warning", warning)
        return table

    def _lag(self) -> str:
        """Return the lag; unknown offline, where the versions of groups are of other runs."""
        return "unknown" if self.config.run.mode == "offline" else self._shown("lag", ".1f")

    def _drift(self) -> str:
        """Return the drift from the version published last; offline, from the policy that wrote the batch."""
        return self._shown("drift_published" if self.config.run.mode != "offline" else "drift_tv_token", ".4f")

    def _shown(self, name: str, form: str) -> str:
        value = self._metric(name)
        return "unknown" if value is None else format(value, form)

    def _metric(self, name: str) -> float | None:
        return cast(dict[str, float | None], self.step.get("metrics", {})).get(name)
