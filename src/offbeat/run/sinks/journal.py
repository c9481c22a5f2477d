"""The journal of a run with its sinks.

Everything is in `events.jsonl`; a sink gets the numbers of each event, and with each checkpoint a table of samples. If
a sink fails, the run logs one warning, stops writing to it, and continues.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from offbeat.config.parts import SINKS
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.imports import install_command, load_own
from offbeat.metrics import METRICS
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal, Listener
from offbeat.run.sinks.samples import NewestSamples, Sample
from offbeat.run.sinks.values import Value, metrics_of, values_of
from offbeat.types import Json

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where numbers and samples go."""

    def write(self, step: int, values: Sequence[Value]) -> None:
        """Write the numbers of one event."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Write a table of completions."""

    def close(self) -> None: ...


@dataclass
class GuardedSink:
    """A sink whose errors do not reach the run."""

    name: str
    sink: Sink
    samples: Callable[[int], Sequence[Sample]] = lambda step: ()
    failed: bool = False

    def __call__(self, event: Mapping[str, Json]) -> None:
        """Write the numbers of one event, and samples with a checkpoint."""
        if not self.failed and (values := values_of(event)):
            # A pass rate belongs to the version that it measures.
            step = cast(int, event.get("version", event["step"]))
            self._try(lambda: self.sink.write(step, values))
        if not self.failed and event["kind"] == EventKind.SAVED:
            self._try(lambda: self._show(cast(int, event["step"])))

    def _show(self, step: int) -> None:
        if samples := self.samples(step):
            self.sink.show(step, samples)

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
        samples = NewestSamples(directory, directory.config()) if sinks else None
        opened = [GuardedSink(name, _open(name, directory), samples.read) for name in sinks if samples is not None]
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
        return cast("Callable[[Path], Sink]", load_own(SINKS[name].open if name in SINKS else name))(directory.path)
    except ModuleNotFoundError as error:
        missing = f"{name} needs {error.name}, which is not installed"
        install = install_command(name) if name in SINKS else f"pip install {error.name}"
        raise RunError(f"run.sinks: {missing}: {install}") from error
