"""The newest numbers in a text file that Prometheus collects."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.metrics import METRICS
from offbeat.run.sinks.samples import Sample
from offbeat.run.sinks.values import Value
from offbeat.storage.files import write_atomically


def prometheus(run: Path) -> "PrometheusFile":
    """Write `offbeat.prom` in the run directory."""
    return PrometheusFile(run / "offbeat.prom", run.resolve().name)


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

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Prometheus takes no text."""

    def close(self) -> None:
        """The file stays."""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
