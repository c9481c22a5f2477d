"""The plain lines of a run: no more than a reader can follow, and labels that say what happens."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from offbeat.config import parse
from offbeat.events import EventKind
from offbeat.reports import live
from offbeat.reports.live import LiveView
from offbeat.run.journal import Phase


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the view reads."""
    time = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def steps_shown(now: list[float], seconds: float, steps: int) -> list[int]:
    """Return the steps whose lines are printed if each takes so long."""
    out = io.StringIO()
    view = LiveView(parse({"steps": steps}), Console(file=out, width=200), _news=now[0])
    for step in range(1, steps + 1):
        now[0] += seconds
        view({"kind": EventKind.STEP, "step": step, "metrics": {}, "seconds": {}})
    return [int(line.split("/")[0].removeprefix("step ")) for line in out.getvalue().splitlines()]


def test_quick_steps_share_a_line_and_slow_ones_have_their_own(now: list[float]) -> None:
    assert steps_shown(now, 2.0, steps=4) == [1, 2, 3, 4]
    quick = steps_shown(now, 0.1, steps=95)
    assert len(quick) <= 12 and quick[-1] == 95, "about one a second, and the last one in any case"


def test_the_label_is_the_phase_of_the_loop() -> None:
    phases = iter([None, Phase.PUBLISHING, Phase.GROUPS, Phase.ITSELF, Phase.TRAINING])
    view = LiveView(parse({}), Console(file=io.StringIO()), lambda: next(phases))
    assert [view.doing() for _ in range(5)] == [
        "loading the model", "publishing the new version", "generating", "generating", "training",
    ]  # fmt: skip
    offline = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}
    assert LiveView(parse(offline), Console(file=io.StringIO()), lambda: Phase.GROUPS).doing() == "reading the log"
