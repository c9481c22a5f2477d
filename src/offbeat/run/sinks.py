"""Sinks: copies of the metrics for tensorboard, wandb, trackio and Prometheus.

Everything is in `events.jsonl`; a sink gets the numbers of each event. If a sink fails, the run logs one warning, stops
writing to it, and continues.
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
from offbeat.events import EventKind
from offbeat.imports import install_command
from offbeat.metrics import METRICS
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal, Listener
from offbeat.storage.files import write_atomically
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
    """For example ("lag", "4-7"), if the number is not of the whole step."""

    @property
    def path(self) -> str:
        """The name with its label, for sinks without labels."""
        return self.name if self.label is None else f"{self.name}/{' '.join(self.label)}"


def values_of(event: Mapping[str, Json]) -> list[Value]:
    """Return the numbers of an event that are worth a curve.

    >>> step = {"kind": "step", "step": 4, "metrics": {"ess": 0.9}, "by_lag": {"2-3": {"ess": 0.8}}}
    >>> [(value.path, value.number) for value in values_of(step)]
    [('ess', 0.9), ('ess/lag 2-3', 0.8)]
    """
    found = _numbers(event.get("metrics"))
    for bucket, figures in cast("Mapping[str, Json]", event.get("by_lag") or {}).items():
        found += _numbers(figures, ("lag", bucket))
    if event["kind"] == EventKind.STEP:
        spent = cast("Mapping[str, float]", event.get("seconds") or {})
        found += [Value("seconds", seconds, ("phase", phase)) for phase, seconds in spent.items()]
    if event["kind"] == EventKind.EVALUATED:
        rates = {name: rate[0] for name, rate in event.items() if isinstance(rate, list) and rate}
        found += _numbers(rates)
    if event["kind"] == EventKind.PUBLISHED:
        found += _numbers({"published_version": event["version"], "published_bytes": event.get("bytes")})
    return found


def metrics_of(event: Mapping[str, Json]) -> set[str]:
    """Return the names of the metrics in an event.

    >>> sorted(metrics_of({"kind": "evaluated", "step": 4, "prompts": 64, "pass@1": [0.5, 0.4, 0.6]}))
    ['pass@1']
    """
    if event["kind"] == EventKind.EVALUATED:
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
        """Write the numbers of one event."""

    def close(self) -> None: ...


@dataclass
class PrometheusFile:
    """The newest value of each metric, for node_exporter's textfile collector.

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
        """See `Sink`. Replaces the file in one step, so that a reader never sees half of it."""
        for value in (*values, Value("step", step)):
            self._newest.setdefault(value.name, {})[value.label] = value.number
        write_atomically(self.path, "".join(self._lines()).encode(), durable=False)

    def _lines(self) -> Iterator[str]:
        for name, numbers in sorted(self._newest.items()):
            full = "offbeat_" + re.sub(r"\W", "_", name)
            meaning = METRICS[name].meaning if name in METRICS else f"offbeat {name}"
            yield f"# HELP {full} {meaning}\n# TYPE {full} gauge\n"
            for label, number in numbers.items():
                labels = ",".join(
                    f'{key}="{_escape(text)}"' for key, text in [("run", self.run), *filter(None, [label])]
                )
                yield f"{full}{{{labels}}} {number}\n"

    def close(self) -> None:
        """The file stays."""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass(frozen=True)
class LibrarySink:
    """A sink that calls another library."""

    write: Callable[[int, Sequence[Value]], None]
    close: Callable[[], None]


def _tensorboard(directory: RunDirectory) -> Sink:
    writer = import_module("tensorboard.summary").Writer(str(directory.path / "tensorboard"))

    def write(step: int, values: Sequence[Value]) -> None:
        for value in values:
            writer.add_scalar(value.path, value.number, step)
        writer.flush()

    return LibrarySink(write, writer.close)


def _wandb(directory: RunDirectory) -> Sink:
    """Online or offline, as WANDB_MODE says. A resumed run continues the same curve."""
    wandb, name = import_module("wandb"), directory.path.resolve().name
    began = json.loads((directory.path / "environment.json").read_text(encoding="utf-8"))["began"]
    run = wandb.init(
        project="offbeat",
        name=name,
        dir=str(directory.path),
        id=re.sub(r"\W", "-", f"{name}-{began}"),
        resume="allow",
        config=directory.config().model_dump(mode="json"),
        settings=wandb.Settings(silent=True, console="off", login_timeout=30),
    )
    # The step of wandb never decreases, but a resumed run repeats steps.
    run.define_metric("*", step_metric="step")
    return LibrarySink(
        lambda step, values: run.log({"step": step, **{value.path: value.number for value in values}}), run.finish
    )


def _trackio(directory: RunDirectory) -> Sink:
    run = import_module("trackio").init(
        project="offbeat",
        name=directory.path.resolve().name,
        config=directory.config().model_dump(mode="json"),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return LibrarySink(
        lambda step, values: run.log({value.path: value.number for value in values}, step=step), run.finish
    )


def _prometheus(directory: RunDirectory) -> Sink:
    return PrometheusFile(directory.path / "offbeat.prom", directory.path.resolve().name)


SINKS: Final[Mapping[str, Callable[[RunDirectory], Sink]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "prometheus": _prometheus,
}


@dataclass
class GuardedSink:
    """A sink whose errors do not reach the run."""

    name: str
    sink: Sink
    failed: bool = False

    def __call__(self, event: Mapping[str, Json]) -> None:
        """Write the numbers of one event."""
        if not self.failed and (values := values_of(event)):
            # A pass rate belongs to the version that it measures.
            step = event.get("version", event["step"])
            self._try(lambda: self.sink.write(cast(int, step), values))

    def close(self) -> None:
        """Close the sink even if it failed: it may hold earlier numbers."""
        self._try(self.sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a boundary to other packages and their servers: training continues after any error
            if not self.failed:
                _log.warning(
                    "sink %s failed and is off from now on: %s; events.jsonl has all metrics", self.name, error
                )
            self.failed = True


@contextmanager
def open_journal(directory: RunDirectory, sinks: Sequence[str], watching: Listener | None) -> Iterator[FileJournal]:
    """Open the journal of a run. Its sinks and `watching` get every event; an undeclared metric is an error."""
    with ExitStack() as stack:
        opened = [GuardedSink(name, _open(name, directory)) for name in sinks]
        for sink in opened:
            stack.callback(sink.close)
        listeners: list[Listener] = [*opened, *([watching] if watching is not None else [])]

        def notify(event: Mapping[str, Json]) -> None:
            if undeclared := metrics_of(event) - METRICS.keys():
                raise ValueError(
                    f"{', '.join(sorted(undeclared))}: not declared; declare the metric in offbeat/metrics.py"
                )
            for listener in listeners:
                listener(event)

        yield stack.enter_context(FileJournal(directory.events, listener=notify))


def _open(name: str, directory: RunDirectory) -> Sink:
    try:
        return SINKS[name](directory)
    except ModuleNotFoundError as error:
        missing = f"{name} needs {error.name}, which is not installed"
        raise RunError(f"run.sinks: {missing}: {install_command(name)}") from error
