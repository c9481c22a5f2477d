"""Copies of a run's metrics for other tools. `docs/how-to/dashboards.md` has the names that arrive there.

journal.py      the journal of a run, and what happens if a sink fails
values.py       the numbers of an event, and their names in TRL
samples.py      the newest completions as text
trackers.py     tensorboard, wandb, trackio, MLflow
prometheus.py   a text file with the newest numbers
"""

from offbeat.run.sinks.journal import GuardedSink, Sink, open_journal
from offbeat.run.sinks.prometheus import PrometheusFile
from offbeat.run.sinks.values import Value, curves_of, metrics_of, plain_curves_of, values_of

__all__ = [
    "GuardedSink",
    "PrometheusFile",
    "Sink",
    "Value",
    "curves_of",
    "metrics_of",
    "open_journal",
    "plain_curves_of",
    "values_of",
]
