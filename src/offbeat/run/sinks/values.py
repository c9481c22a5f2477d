"""The numbers of an event, and their names in TRL, so that both tools' runs share their charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from offbeat.events import EventKind
from offbeat.types import Json

TRL_NAMES: Final = {
    "reward_mean": "reward",
    "zero_variance_share": "frac_reward_zero_std",
    "completion_length": "completions/mean_length",
    "truncated_share": "completions/clipped_ratio",
    "reference_kl": "kl",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "engine_gap": "sampling/sampling_logp_difference/mean",
    "mean reward": "eval_reward",
}
"""Metrics that TRL computes from the same formula, and its name for them. Others have no counterpart: TRL's clip
ratios, for instance, count all tokens, and `gate_stopped_up` those with A > 0."""


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


def curves_of(values: Sequence[Value]) -> dict[str, float]:
    """Return the numbers by name, and a copy under TRL's name where it has one.

    TRL's names get the prefixes that its own callbacks for wandb, trackio and tensorboard add.

    >>> curves_of([Value("reward_mean", 0.5), Value("mean reward", 0.6)])
    {'reward_mean': 0.5, 'train/reward': 0.5, 'mean reward': 0.6, 'eval/reward': 0.6}
    """
    found: dict[str, float] = {}
    for value in values:
        found[value.path] = value.number
        if (theirs := _trl_name(value)) is not None:
            measured, _, name = theirs.partition("_") if theirs.startswith("eval_") else ("train", "", theirs)
            found[f"{measured}/{name}"] = value.number
    return found


def plain_curves_of(values: Sequence[Value]) -> dict[str, float]:
    """Return the numbers by name with TRL's copies as its callback for MLflow names them: without prefixes.

    MLflow takes no @ in a name, so pass@1 is pass_at_1.

    >>> plain_curves_of([Value("reward_mean", 0.5), Value("pass@1", 0.6)])
    {'reward_mean': 0.5, 'reward': 0.5, 'pass_at_1': 0.6}
    """
    found: dict[str, float] = {}
    for value in values:
        for name in (value.path, _trl_name(value)):
            if name is not None:
                found[name.replace("@", "_at_")] = value.number
    return found


def _trl_name(value: Value) -> str | None:
    return TRL_NAMES.get(value.name) if value.label is None else None
