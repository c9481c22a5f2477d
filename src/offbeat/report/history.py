"""A run's journal as figures: what happened, in order, without the steps that a resume took back."""

import fcntl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from offbeat.events import ROUTINE, EventKind
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.types import Json

LARGEST: Final = 1e100


class RunState(StrEnum):
    """How far a run has come."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """Before its last step, with a checkpoint."""
    RUNNING = "running"
    PAUSED = "paused"
    """It waits for a person to remove the file `pause`."""
    BROKEN_OFF = "broken off"
    """Killed or failed: the journal has no last word, and nobody drives the run."""


@dataclass(frozen=True)
class Step:
    """One batch, trained."""

    step: int
    metrics: Mapping[str, float]
    by_lag: Mapping[str, Mapping[str, float]]
    lags: Sequence[float]
    """Of its groups that a version of ours wrote."""
    versions: Mapping[int, int]
    """Scored groups by oldest version."""


@dataclass(frozen=True)
class Publish:
    """One version in the weight log."""

    version: int
    why: str
    how: str
    bytes: float


@dataclass(frozen=True)
class EvaluationPoint:
    """Pass rates of the policy after a step: (value, low, high) by name."""

    step: int
    estimates: Mapping[str, tuple[float, float, float]]
    prompts: int


@dataclass(frozen=True)
class Note:
    """Something a person should read."""

    step: int
    kind: str
    says: str
    groups: Sequence[str] = ()


@dataclass(frozen=True)
class RunHistory:
    """All of it."""

    steps: Sequence[Step] = ()
    publishes: Sequence[Publish] = ()
    evaluations: Sequence[EvaluationPoint] = ()
    notes: Sequence[Note] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, over all processes that drove the run."""
    wall: float = 0.0
    """Seconds between first and last event, time between a crash and its resume left out."""
    ended: str | None = None
    """Why it ended: empty at its last step, None where the journal has no last word."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps that have the metric, and its values.

        >>> one = Step(1, {"loss": 0.5}, {}, [], {})
        >>> RunHistory(steps=[one]).series("loss"), RunHistory(steps=[one]).series("ess")
        (([1.0], [0.5]), ([], []))
        """
        found = [(one.step, one.metrics[metric]) for one in self.steps if metric in one.metrics]
        return [float(step) for step, _ in found], [value for _, value in found]

    @property
    def last_step(self) -> int:
        """k, as far as the journal tells."""
        return self.steps[-1].step if self.steps else 0


def history_of(events: Iterable[Mapping[str, Json]]) -> RunHistory:
    """Events of one journal, put in order.

    >>> made = [{"at": float(s), "step": s, "kind": "step", "metrics": {"loss": 1.0}} for s in (1, 2, 3)]
    >>> back = {"at": 9.0, "step": 1, "kind": "resumed"}
    >>> [one.step for one in history_of([*made, back]).steps]
    [1]
    """
    telling = _Telling()
    for event in events:
        if isinstance(event, dict):
            telling.hear(event)
    return telling.told()


class _Telling:
    """Hears one event after the other."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.publishes: list[Publish] = []
        self.evaluations: list[EvaluationPoint] = []
        self.notes: list[Note] = []
        self.ended: str | None = None
        self._seconds: list[dict[str, float]] = []
        self._times: list[tuple[float, float]] = []

    def hear(self, event: Mapping[str, Json]) -> None:
        kind, at, step = event.get("kind"), _number(event.get("at")), _whole(event.get("step"))
        if kind in (EventKind.ESTIMATED, EventKind.RESUMED) or not self._times:  # the first words of a process
            self._seconds.append({})
            self._times.append((at or 0.0, at or 0.0))
            self.ended = None
        if at is not None:
            self._times[-1] = (self._times[-1][0], at)
        if seconds := _numbers(event.get("seconds")):
            self._seconds[-1] = seconds
        if kind == EventKind.RESUMED:
            self._rewind(step)
        if kind == EventKind.STEP:
            self.steps.append(_step(step, event))
        elif kind == EventKind.PUBLISHED:
            how = str(event.get("how", ""))
            self.publishes.append(Publish(step, str(event.get("why", "")), how, _number(event.get("bytes")) or 0.0))
        elif kind == EventKind.EVALUATED:
            self.evaluations.append(_evaluation(step, event))
        elif kind == EventKind.ENDED:
            self.ended = str(event.get("why", ""))
        elif kind not in ROUTINE:
            self.notes.append(_note(step, str(kind), event))

    def _rewind(self, step: int) -> None:
        self.steps = [one for one in self.steps if one.step <= step]
        self.publishes = [one for one in self.publishes if one.version <= step]
        self.evaluations = [one for one in self.evaluations if one.step <= step]

    def told(self) -> RunHistory:
        seconds: dict[str, float] = {}
        for part in self._seconds:
            for phase, spent in part.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        wall = sum(end - begin for begin, end in self._times)
        return RunHistory(self.steps, self.publishes, self.evaluations, self.notes, seconds, wall, self.ended)


def _step(step: int, event: Mapping[str, Json]) -> Step:
    by_lag, lags, rewards = (event.get(name) for name in ("by_lag", "lags", "rewards"))
    counts: dict[int, int] = {}
    for version, pair in rewards.items() if isinstance(rewards, dict) else ():
        if version.isdecimal() and isinstance(pair, list) and len(pair) == 2:
            counts[int(version)] = _whole(pair[1])
    return Step(
        step,
        _numbers(event.get("metrics")),
        {bucket: _numbers(values) for bucket, values in by_lag.items()} if isinstance(by_lag, dict) else {},
        [value for lag in lags if (value := _number(lag)) is not None] if isinstance(lags, list) else [],
        counts,
    )


def _evaluation(step: int, event: Mapping[str, Json]) -> EvaluationPoint:
    estimates = {}
    for name, value in event.items():
        if isinstance(value, list) and len(value) == 3 and None not in (three := [_number(one) for one in value]):
            estimates[name] = (three[0] or 0.0, three[1] or 0.0, three[2] or 0.0)
    return EvaluationPoint(step, estimates, _whole(event.get("prompts")))


def _note(step: int, kind: str, event: Mapping[str, Json]) -> Note:
    groups = event.get("groups", [])
    if isinstance(groups, dict):  # refused: a reason for each
        says = "; ".join(f"{name}: {why}" for name, why in groups.items())
    else:
        says = str(event.get("says", event.get("why", "")))
    who = [str(event[name]) for name in ("worker", "rank", "pool") if name in event]
    says = ": ".join(part for part in (*who, says) if part)
    if kind == EventKind.ALARM:
        kind = f"alarm, {event.get('action', 'warn')}"
    return Note(step, kind, says, [str(one) for one in groups] if isinstance(groups, list | dict) else [])


def state_of(directory: RunDirectory, history: RunHistory, steps: int) -> RunState:
    """How far the run has come; `steps` is how far it was to go."""
    if _driven(directory):
        return RunState.PAUSED if directory.pause.exists() else RunState.RUNNING
    if history.ended is None:
        return RunState.BROKEN_OFF
    return RunState.STOPPED if history.ended and history.last_step < steps else RunState.FINISHED


def _driven(directory: RunDirectory) -> bool:
    """Whether a process holds the run's lock; looked at for an instant."""
    try:
        with (directory.path / "driver.lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_history(directory: RunDirectory) -> RunHistory:
    """Of the run in this directory, also while it goes on."""
    return history_of(read(directory.events)) if directory.events.exists() else RunHistory()


def _number(value: Json) -> float | None:
    """None for what is no number, and for what no plot could hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)


def _whole(value: Json) -> int:
    return int(_number(value) or 0)


def _numbers(values: Json) -> dict[str, float]:
    """Those that are numbers: what JSON could not hold is null."""
    pairs = values.items() if isinstance(values, dict) else ()
    return {name: number for name, value in pairs if (number := _number(value)) is not None}
