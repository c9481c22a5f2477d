"""offbeat: off-policy group-relative reinforcement learning for language models.

The public API is what `__all__` lists; docs/reference/api.md documents it. Every other module is private: it may change
without notice. Names load on first use, so `import offbeat` needs neither torch nor time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from offbeat.api import check, evaluate, load_config, report, resume, tiny_model, train
    from offbeat.config import Config
    from offbeat.errors import ConfigError, OffbeatError
    from offbeat.experience.log import ExperienceLog
    from offbeat.objective.losses import policy_loss
    from offbeat.objective.presets import PRESETS as presets
    from offbeat.reports.run import Run
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group, Prompt, Score, Unscorable
    from offbeat.weights.publisher import WeightLog

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Config",
    "ConfigError",
    "ExperienceLog",
    "Group",
    "OffbeatError",
    "Prompt",
    "Run",
    "Score",
    "Task",
    "Unscorable",
    "WeightLog",
    "check",
    "evaluate",
    "load_config",
    "policy_loss",
    "presets",
    "report",
    "resume",
    "tiny_model",
    "train",
]

_HOMES: Final = {
    **dict.fromkeys(["check", "evaluate", "load_config", "report", "resume", "tiny_model", "train"], "offbeat.api"),
    **dict.fromkeys(["Completion", "Group", "Prompt", "Score", "Unscorable"], "offbeat.types"),
    **dict.fromkeys(["ConfigError", "OffbeatError"], "offbeat.errors"),
    "Config": "offbeat.config",
    "ExperienceLog": "offbeat.experience.log",
    "Run": "offbeat.reports.run",
    "Task": "offbeat.tasks.task",
    "WeightLog": "offbeat.weights.publisher",
    "policy_loss": "offbeat.objective.losses",
    "presets": "offbeat.objective.presets",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    found: object = getattr(home, "PRESETS" if name == "presets" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
