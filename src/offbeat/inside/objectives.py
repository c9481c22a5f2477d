"""Which objectives a hook of another trainer can serve, and why it refuses the others. No torch."""

from dataclasses import replace
from typing import Final

from offbeat.config.objective import ObjectiveConfig
from offbeat.errors import NotServable, suggest_nearest
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL, Advantage, Need, Objective

BOTH: Final = frozenset({Need.BEHAVIOR, Need.PROXIMAL})


def refusal(objective: Objective, *, host: str, streams: int = 2) -> str:
    """Return why a host cannot serve an objective; empty if it can.

    `streams` is the number of log-prob streams beside the policy's that the host passes to its loss.

    >>> refusal(PRESETS["tis"].objective, host="verl", streams=1)
    'it needs the log-probs of the behavior and of the proximal policy, and verl passes one of them'
    >>> refusal(PRESETS["tis"].objective, host="TRL")
    ''
    """
    if objective.needs_first_look:
        return f"it looks at the whole batch before every update, and {host} shows its loss one micro-batch at a time"
    if streams < 2 and objective.needs >= BOTH:
        return f"it needs the log-probs of the behavior and of the proximal policy, and {host} passes one of them"
    if objective.advantage is Advantage.SHRUNK:
        return f"it needs the earlier results of each prompt, which {host} does not keep"
    if streams < 2 and any(isinstance(term, KL) for term in objective.regularizers):
        return f"{host} adds its own KL term: leave it out here and set it there"
    return ""


def servable(host: str, *, streams: int = 2) -> list[str]:
    """Return the presets that a host can serve.

    >>> len(PRESETS), len(servable("TRL")), len(servable("verl", streams=1))
    (26, 24, 19)
    """
    return [name for name, preset in PRESETS.items() if not refusal(preset.objective, host=host, streams=streams)]


def objective_for(
    chosen: str | Objective, *, host: str, streams: int = 2, kl_coefficient: float = 0.0, prefix: str = ""
) -> Objective:
    """Return the objective of a preset, or your own, with a KL term if there is a coefficient.

    Raises `NotServable` with the reason and with the presets that the host can serve; it writes names with `prefix`.

    >>> objective_for("grpo-off-policy", host="verl", streams=1)
    Traceback (most recent call last):
    offbeat.errors.NotServable: 'grpo-off-policy' cannot run inside verl: it needs the log-probs of the behavior ...
    """
    name = prefix + chosen if isinstance(chosen, str) else "this objective"
    usable = [prefix + one for one in servable(host, streams=streams)]
    if isinstance(chosen, str):
        try:
            objective = ObjectiveConfig(preset=chosen, kl_coefficient=kl_coefficient).resolve()
        except ValueError as error:
            near = suggest_nearest(prefix + chosen, usable)
            raise NotServable(f"{prefix + chosen!r} is not a preset; {near}") from error
    else:
        weighted = Need.BEHAVIOR in chosen.needs
        term = (KL(kl_coefficient, weighted=weighted),) if kl_coefficient else ()
        objective = replace(chosen, regularizers=(*chosen.regularizers, *term))
    if reason := refusal(objective, host=host, streams=streams):
        others = ", ".join(usable)
        raise NotServable(f"{name!r} cannot run inside {host}: {reason}. Choose among {others}, or use offbeat.train")
    return objective
