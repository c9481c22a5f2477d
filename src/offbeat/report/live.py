"""What a person sees while a run goes on: one screen that stays, or plain lines where there is no terminal."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from offbeat.config import Config
from offbeat.events import TROUBLE, EventKind
from offbeat.run.journal import Phase
from offbeat.types import Json

BARS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last values as bars, from the lowest to the highest of them.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def verdict(seconds: Mapping[str, float]) -> str:
    """Where the time goes, in words.

    >>> verdict({"waiting for groups": 70.0, "training": 25.0, "the loop itself": 5.0})
    'generation-bound: the trainer waits for groups 70 % of the time'
    """
    total = sum(seconds.values())
    if not total:
        return "nothing measured yet"
    phase, most = max(seconds.items(), key=lambda item: item[1])
    share = f"{100 * most / total:.0f} % of the time"
    if phase == Phase.GROUPS:
        return f"generation-bound: the trainer waits for groups {share}"
    if phase == Phase.TRAINING:
        return f"training-bound: {share} is spent in updates"
    return f"{phase} takes {share}"


@dataclass
class LiveView:
    """Is told every event, and shows the state of the run."""

    config: Config
    console: Console
    rewards: list[float] = field(default_factory=list)
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    step: Mapping[str, Json] = field(default_factory=dict)
    published: int = 0
    passed: str = ""
    _live: Live | None = None

    def __enter__(self) -> "LiveView":
        if self.console.is_terminal:
            self._live = Live(self.render(), console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def __call__(self, event: Mapping[str, Json]) -> None:
        """One event of the journal."""
        kind = event["kind"]
        if kind == EventKind.STEP:
            self.step = event
            self.rewards.append(self._metric("reward_mean"))
        elif kind == EventKind.PUBLISHED:
            self.published = cast(int, event["version"])
        elif kind == EventKind.EVALUATED and "pass@1" in event:
            value, low, high = cast(list[float], event["pass@1"])
            self.passed = f"{value:.3f} [{low:.3f}, {high:.3f}] at step {event['step']}"
        elif kind == EventKind.ALARM:
            self.alarms.append(f"step {event['step']}: {event['says']}")
        elif kind in TROUBLE:
            self.alarms.append(f"step {event['step']}: {kind}: {event.get('why', event.get('worker', ''))}"[:200])
        if self._live is not None:
            self._live.update(self.render())
        elif line := self.line(event):
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def line(self, event: Mapping[str, Json]) -> str:
        """An event as one plain line; empty for what is not worth one."""
        step, kind = event["step"], event["kind"]
        if kind == EventKind.STEP:
            return (
                f"step {step}/{self.config.steps}  reward {self.rewards[-1]:.3f}  lag {self._metric('lag'):.1f}  "
                f"drift {self._metric('drift_tv_token'):.4f}"
            )
        if kind == EventKind.PUBLISHED:
            return f"step {step}  published version {event['version']} ({event['why']}, {event.get('bytes', 0)} bytes)"
        if kind == EventKind.EVALUATED:
            return f"step {step}  pass@1 {self.passed}"
        if kind == EventKind.ESTIMATED:
            return str(event["memory"]).splitlines()[0]
        if kind in (EventKind.WORKER_JOINED, EventKind.WORKER_LEFT, EventKind.WORKER_READY):
            return f"step {step}  {kind}: {event['worker']}"
        if kind in TROUBLE or kind in (EventKind.ALARM, EventKind.RESUMED):
            return f"step {step}  {kind}: {event.get('says', event.get('why', ''))}"
        return ""

    def render(self) -> RenderableType:
        """The whole screen."""
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{self.step.get('step', 0)} of {self.config.steps}")
        if self.rewards:
            table.add_row("reward", f"{self.rewards[-1]:.3f}  {sparkline(self.rewards)}")
        if self.passed:
            table.add_row("pass@1", self.passed)
        table.add_row("lag", f"{self._metric('lag'):.1f} of at most {self.config.largest_lag}")
        budget = self.config.sync.drift_budget
        table.add_row("drift", f"{self._metric('drift_tv_token'):.4f}" + (f" of {budget:g}" if budget else ""))
        next_sync = self.published + self.config.sync.every
        due = f"at step {next_sync}" if budget is None else f"by drift, at the latest at step {next_sync}"
        table.add_row("sync", f"serving version {self.published}; next {due}")
        seconds = cast(dict[str, float], self.step.get("seconds", {}))
        total = sum(seconds.values()) or 1.0
        shares = ", ".join(f"{name} {100 * spent / total:.0f} %" for name, spent in seconds.items() if spent)
        table.add_row("time", f"{shares}\n{verdict(seconds)}")
        for alarm in self.alarms:
            table.add_row("note", alarm)
        return table

    def _metric(self, name: str) -> float:
        metrics = cast(dict[str, float], self.step.get("metrics", {}))
        return metrics.get(name) or 0.0
