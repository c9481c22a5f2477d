"""Parts of your own that a run could not use: they are not found, or cannot be called as they will be."""

import inspect
from collections.abc import Mapping
from typing import Final

from offbeat.config import Config
from offbeat.errors import OwnPartError
from offbeat.imports import load_own
from offbeat.objective.spec import Objective

TAKES: Final[Mapping[str, tuple[str, ...]]] = {
    "objective.advantage": ("rewards_BG", "scored_BG"),
    "objective.gate": ("ratios_NT", "advantages_N1"),
    "objective.weight": ("ratios_NT", "advantages_N1"),
    "sync.cadence": ("since", "publish_seconds"),
    "engine.kind": ("config", "place"),
    "run.sinks": ("run",),
}
"""The arguments with which each part is called."""


def check_own_parts(config: Config) -> list[str]:
    """Load every part of your own and check that it takes its arguments."""
    found = []
    for setting, reference in config.own_parts:
        try:
            if problem := _problem(setting, load_own(reference)):
                found.append(f"{setting} = {reference!r} {problem}")
        except OwnPartError as error:
            found.append(f"{setting} = {reference!r}: {error}")
    return found


def _problem(setting: str, part: object) -> str:
    if setting == "objective.preset":
        return "" if isinstance(part, Objective) else f"is a {type(part).__name__}, not an Objective"
    call, arguments = part, TAKES[setting]
    if setting == "sync.cadence":
        try:
            call = getattr(part() if inspect.isclass(part) else part, "due", None)
        except TypeError as error:
            return f"cannot be made without arguments ({error}); give its fields defaults, or name an object of it"
    if not callable(call):
        method = "has no method due" if setting == "sync.cadence" else f"is {part!r:.40}, not a function"
        return f"{method}; it is called with ({', '.join(arguments)})"
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        return f"cannot be called with ({', '.join(arguments)}): {error}"
    except ValueError:
        pass  # a function of C does not say what it takes
    return ""
