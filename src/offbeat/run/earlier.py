"""The loop's part of a checkpoint that an earlier version saved, in today's form."""

from collections.abc import Mapping
from typing import Any

from offbeat.run.cadence import StepEvidence
from offbeat.run.evidence import PublishEvidence
from offbeat.types import Json


def translate_state(step: int, saved: Mapping[str, Any]) -> dict[str, Json]:
    """Return what the checkpoint of `step` saved beside model and optimizer.

    0.1.0 saved no evidence about publishes, no retired groups and no history of prompts. The steps since its last
    publish are known, so the next publish is due when it was due then; what they measured is not.
    """
    state = dict(saved)
    if "evidence" not in state:
        since = [StepEvidence()] * (step - int(state["published"]))
        state["evidence"] = PublishEvidence(since).state()
    if state["sampler"]["format"] == 1:
        state["sampler"] = {**state["sampler"], "format": 2, "retired": [], "priors": None}
    return state
