"""Parts of a run that the configuration names: engines and sinks, each registered here, once. No torch.

A part of your own has no entry: its name is its reference, `file.py:name`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from offbeat.errors import suggest_nearest
from offbeat.imports import is_reference


@dataclass(frozen=True)
class EngineKind:
    """How a kind of engine is started, and what follows from it."""

    start: str
    """The reference of a function or class: it takes the configuration and the engine's place in the device plan (None
    without one), and returns an `Engine`, or awaits one."""
    module: str = ""
    """What must be installed for it."""
    batches: bool = False
    """True if it batches by itself what concurrent calls ask for. Any other gets all groups in one call."""
    splits: bool = False
    """True if one engine can take several GPUs."""

    @classmethod
    def of(cls, name: str) -> "EngineKind":
        """Return the kind of a name, or of the reference of your own engine."""
        return ENGINES.get(name) or cls(name)


ENGINES: Final[Mapping[str, EngineKind]] = {
    "hf": EngineKind("offbeat.run.engines:start_hf"),
    "vllm": EngineKind("offbeat.run.engines:start_vllm", "vllm", batches=True, splits=True),
}


@dataclass(frozen=True)
class SinkKind:
    """How a kind of sink is opened."""

    open: str
    """The reference of a function or class: it takes the path of the run directory, and returns a `Sink`."""
    module: str = ""
    """What must be installed for it."""


SINKS: Final[Mapping[str, SinkKind]] = {
    "tensorboard": SinkKind("offbeat.run.sinks.trackers:tensorboard", "tensorboard"),
    "wandb": SinkKind("offbeat.run.sinks.trackers:wandb", "wandb"),
    "trackio": SinkKind("offbeat.run.sinks.trackers:trackio", "trackio"),
    "mlflow": SinkKind("offbeat.run.sinks.trackers:mlflow", "mlflow"),
    "prometheus": SinkKind("offbeat.run.sinks.prometheus:prometheus"),
}


@dataclass(frozen=True, eq=False)
class Named:
    """The annotation of a setting that takes one of these names, or the reference of a part of your own."""

    names: Collection[str] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        own = {"type": "string", "format": "reference"}
        return {"anyOf": [{"enum": [*self.names], "type": "string"}, own]} if self.names else own

    def _check(self, value: object) -> object:
        if value in self.names or is_reference(value):
            return value
        near = suggest_nearest(str(value), self.names) if self.names else ""
        own = "write your own as 'file.py:name'"
        raise ValueError(
            f"is not a choice; {near if near.startswith('did') else ', or '.join(filter(None, [near, own]))}"
        )
