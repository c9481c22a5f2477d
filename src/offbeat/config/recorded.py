"""Configurations that earlier versions recorded, in today's settings. No torch.

A run directory and its checkpoints hold every setting, defaults included, as the version that began the run knew them.
A later version may rename a setting, or refuse one that it accepted before. A run continues as it began, so what was
recorded is translated: one function for each version that differs.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from offbeat.config.config import Config
from offbeat.objective.presets import PRESETS


def translate(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration in today's settings.

    >>> translate({"sampler": {"refill": 4}, "objective": {"preset": "dapo"}})["sampler"]
    {'refill': True, 'refill_limit': 4}
    >>> translate({"sampler": {"refill": False, "refill_limit": 8}})["sampler"]
    {'refill': False, 'refill_limit': 8}
    """
    data = deepcopy(dict(recorded))
    # 0.1.0 has no other mark: there `sampler.refill` is a number, today it is a switch.
    if type(data.get("sampler", {}).get("refill")) is int:
        _from_0_1(data)
    # Releases without this setting held nothing out. Their runs keep their training prompts when they are resumed.
    data.setdefault("evaluation", {}).setdefault("hold_out", 0.0)
    if data.get("objective", {}).pop("untested_lag", False):
        _accept_untested_lag(data)
    return data


def _accept_untested_lag(data: dict[str, Any]) -> None:
    """Consent to lag was a setting of the objective, and lifted the limits that follow from its preset."""
    data["accept"] = True
    sync, sampler = data["sync"], data["sampler"]
    if (sync["by_cost"] or sync["drift_budget"] is not None) and sync["every"] is None:
        sync["every"] = max(100, sync["at_least"])
    if sampler["mode"] == "replay" and sampler["retire_age"] is None:
        sampler["retire_age"] = 200


def _from_0_1(data: dict[str, Any]) -> None:
    objective, sampler = data.setdefault("objective", {}), data["sampler"]
    sampler["refill_limit"] = sampler["refill"]
    sampler["refill"] = _masks_zero_variance(objective)  # the mask also made batches refill
    if not objective.get("kl_coefficient"):
        objective.pop("kl_estimator", None)  # recorded as k3 even without a KL term
    if (sync := data.get("sync", {})).get("drift_budget") is None:
        sync.pop("at_least", None)  # had no effect without a budget


def _masks_zero_variance(objective: Mapping[str, Any]) -> bool:
    if (mask := objective.get("zero_variance_mask")) is not None:
        return bool(mask)
    return PRESETS[objective.get("preset", Config().objective.preset)].objective.zero_variance_mask
