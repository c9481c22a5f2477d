"""Metrics to where people look at them: tensorboard, wandb, trackio, a Prometheus text file.

`events.jsonl` remains the truth. A sink is told what is in it; one that fails is left out from then on, with one
warning, and the run goes on.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

from offbeat.errors import RunError
from offbeat.imports import command
from offbeat.metrics import METRICS
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal, Listener
from offbeat.types import Json

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Value:
    """One number of an event.

    >>> Value("ess", 0.9, ("lag", "4-7")).path
    'ess/lag 4-7'
    """

    name: str
    number: float
    label: tuple[str, str] | None = None
    """What it is of, where not of the whole step."""

    @property
    def path(self) -> str:
        """A name for sinks without labels."""
        return self.name if self.label is None else f"{self.name}/{' '.join(self.label)}"


def values_of(event: Mapping[str, Json]) -> list[Value]:
    """The numbers of an event that make curves.

    >>> step = {"kind": "step", "step": 4, "metrics": {"ess": 0.9}, "by_lag": {"2-3": {"ess": 0.8}}}
    >>> [(value.path, value.number) for value in values_of(step)]
    [('ess', 0.9), ('ess/lag 2-3', 0.8)]
    """
    found = _numbers(event.get("metrics"))
    for bucket, figures in cast("Mapping[str, Json]", event.get("by_lag") or {}).items():
        found += _numbers(figures, ("lag", bucket))
    if event["kind"] == "step":
        spent = cast("Mapping[str, float]", event.get("seconds") or {})
        found += [Value("seconds", seconds, ("phase", phase)) for phase, seconds in spent.items()]
    if event["kind"] == "evaluated":
        rates = {name: rate[0] for name, rate in event.items() if isinstance(rate, list) and rate}
        found += _numbers(rates)
    if event["kind"] == "published":
        found += _numbers({"published_version": event["version"], "published_bytes": event.get("bytes")})
    return found


def metrics_of(event: Mapping[str, Json]) -> set[str]:
    """The names of the metrics in an event.

    >>> sorted(metrics_of({"kind": "evaluated", "step": 4, "prompts": 64, "pass@1": [0.5, 0.4, 0.6]}))
    ['pass@1']
    """
    if event["kind"] == "evaluated":
        return {name for name, rate in event.items() if isinstance(rate, list)}
    by_lag = cast("Mapping[str, Mapping[str, float]]", event.get("by_lag") or {})
    tables = [cast("Mapping[str, float]", event.get("metrics") or {}), *by_lag.values()]
    return {name for table in tables for name in table}


def _numbers(figures: Json, label: tuple[str, str] | None = None) -> list[Value]:
    named = figures if isinstance(figures, Mapping) else {}
    return [Value(name, float(one), label) for name, one in named.items() if isinstance(one, int | float)]


class Sink(Protocol):
    """Where numbers go."""

    def write(self, step: int, values: Sequence[Value]) -> None:
        """The numbers of one event."""

    def close(self) -> None:
        """No more will come."""


@dataclass
class PrometheusFile:
    """The newest value of everything, for node_exporter's textfile collector.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     sink = PrometheusFile(Path(place, "offbeat.prom"), "one")
    ...     sink.write(4, [Value("ess", 0.9), Value("ess", 0.8, ("lag", "2-3"))])
    ...     print(sink.path.read_text(), end="")
    # HELP offbeat_ess effective share of a group's samples after importance weighting
    # TYPE offbeat_ess gauge
    offbeat_ess{run="one"} 0.9
    offbeat_ess{run="one",lag="2-3"} 0.8
    # HELP offbeat_step offbeat step
    # TYPE offbeat_step gauge
    offbeat_step{run="one"} 4
    """

    path: Path
    run: str
    _newest: dict[str, dict[tuple[str, str] | None, float]] = field(default_factory=dict)

    def write(self, step: int, values: Sequence[Value]) -> None:
        """See `Sink`. The file is replaced as a whole: nobody reads half of it."""
        for value in (*values, Value("step", step)):
            self._newest.setdefault(value.name, {})[value.label] = value.number
        part = self.path.with_suffix(".part")
        part.write_text("".join(self._lines()), encoding="utf-8")
        part.replace(self.path)

    def _lines(self) -> Iterator[str]:
        for name, numbers in sorted(self._newest.items()):
            full = "offbeat_" + re.sub(r"\W", "_", name)
            meaning = METRICS[name].meaning if name in METRICS else f"offbeat {name}"
            yield f"# HELP {full} {meaning}\n# TYPE {full} gauge\n"
            for label, number in numbers.items():
                labels = ",".join(
                    f'{key}="{_escaped(text)}"' for key, text in [("run", self.run), *filter(None, [label])]
                )
                yield f"{full}{{{labels}}} {number}\n"

    def close(self) -> None:
        """See `Sink`. What is there stays."""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _TensorBoard:
    def __init__(self, directory: RunDirectory) -> None:
        self._writer = import_module("tensorboard.summary").Writer(str(directory.path / "tensorboard"))

    def write(self, step: int, values: Sequence[Value]) -> None:
        for value in values:
            self._writer.add_scalar(value.path, value.number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Online or offline as WANDB_MODE says; a run that is resumed goes on in the same curve."""

    def __init__(self, directory: RunDirectory) -> None:
        wandb, name = import_module("wandb"), directory.path.resolve().name
        began = json.loads((directory.path / "environment.json").read_text(encoding="utf-8"))["began"]
        self._run = wandb.init(
            project="offbeat",
            name=name,
            dir=str(directory.path),
            id=re.sub(r"\W", "-", f"{name}-{began}"),
            resume="allow",
            config=directory.config().model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", login_timeout=30),
        )
        # Its own step may not go back, and ours does where a resumed run makes steps again.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Sequence[Value]) -> None:
        self._run.log({"step": step, **{value.path: value.number for value in values}})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, directory: RunDirectory) -> None:
        self._run = import_module("trackio").init(
            project="offbeat",
            name=directory.path.resolve().name,
            config=directory.config().model_dump(mode="json"),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Sequence[Value]) -> None:
        self._run.log({value.path: value.number for value in values}, step=step)

    def close(self) -> None:
        self._run.finish()


def _prometheus(directory: RunDirectory) -> Sink:
    return PrometheusFile(directory.path / "offbeat.prom", directory.path.resolve().name)


SINKS: Final[Mapping[str, Callable[[RunDirectory], Sink]]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "prometheus": _prometheus,
}


@dataclass
class Guarded:
    """A sink that cannot hurt the run."""

    name: str
    sink: Sink
    failed: bool = False

    def __call__(self, event: Mapping[str, Json]) -> None:
        """One event of the journal."""
        if not self.failed and (values := values_of(event)):
            self._try(lambda: self.sink.write(cast(int, event["step"]), values))

    def close(self) -> None:
        """Also of one that failed: it may hold what it got before."""
        self._try(self.sink.close)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # other people's code and their servers: whatever goes wrong there, training goes on
            if not self.failed:
                _log.warning("sink %s failed and gets nothing more: %s; events.jsonl has everything", self.name, error)
            self.failed = True


@contextmanager
def open_journal(directory: RunDirectory, sinks: Sequence[str], watching: Listener | None) -> Iterator[FileJournal]:
    """The journal of a run, with its sinks and whoever is watching told of every event."""
    with ExitStack() as stack:
        opened = [Guarded(name, _open(name, directory)) for name in sinks]
        for one in opened:
            stack.callback(one.close)
        listeners: list[Listener] = [*opened, *([watching] if watching is not None else [])]

        def tell(event: Mapping[str, Json]) -> None:
            if undeclared := metrics_of(event) - METRICS.keys():
                raise ValueError(f"{', '.join(sorted(undeclared))}: a metric is declared in metrics.py, or not emitted")
            for listener in listeners:
                listener(event)

        yield stack.enter_context(FileJournal(directory.events, listener=tell))


def _open(name: str, directory: RunDirectory) -> Sink:
    try:
        return SINKS[name](directory)
    except ModuleNotFoundError as absent:
        raise RunError(f"run.sinks: {name} needs {absent.name}, which is not installed: {command(name)}") from absent
