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
    from offbeat.experience.feedback import LateScore
    from offbeat.experience.log import ExperienceLog
    from offbeat.objective.credit import assign_credit
    from offbeat.objective.losses import Streams, counts, policy_loss
    from offbeat.objective.presets import PRESETS as presets
    from offbeat.objective.spec import Objective
    from offbeat.reports.run import Run
    from offbeat.tasks.data import Example
    from offbeat.tasks.rewards import Reward
    from offbeat.tasks.task import Task
    from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unscorable, VersionSpan
    from offbeat.weights.publisher import WeightLog

__version__ = "0.1.0"

__all__ = [
    "UNKNOWN",
    "Completion",
    "Config",
    "ConfigError",
    "Example",
    "ExperienceLog",
    "Group",
    "LateScore",
    "Objective",
    "OffbeatError",
    "Prompt",
    "Reward",
    "Run",
    "Score",
    "Streams",
    "Task",
    "Unscorable",
    "VersionSpan",
    "WeightLog",
    "assign_credit",
    "check",
    "counts",
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
    **dict.fromkeys(
        ["UNKNOWN", "Completion", "Group", "Prompt", "Score", "Unscorable", "VersionSpan"], "offbeat.types"
    ),
    **dict.fromkeys(["ConfigError", "OffbeatError"], "offbeat.errors"),
    **dict.fromkeys(["Streams", "counts", "policy_loss"], "offbeat.objective.losses"),
    "Config": "offbeat.config",
    "Example": "offbeat.tasks.data",
    "ExperienceLog": "offbeat.experience.log",
    "LateScore": "offbeat.experience.feedback",
    "Objective": "offbeat.objective.spec",
    "Reward": "offbeat.tasks.rewards",
    "Run": "offbeat.reports.run",
    "Task": "offbeat.tasks.task",
    "WeightLog": "offbeat.weights.publisher",
    "assign_credit": "offbeat.objective.credit",
    "presets": "offbeat.objective.presets",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    from offbeat.working import TICK, Working

    with Working("loading offbeat", after=TICK):  # less than a second, unless the machine is busy
        home = import_module(_HOMES[name])
    found: object = getattr(home, "PRESETS" if name == "presets" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
