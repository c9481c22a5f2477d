"""Every event a run writes to `events.jsonl`, declared once: its kind, what it means, and what to do about it.

The live view, the report and the reference page all read these declarations. No torch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class EventKind(StrEnum):
    """The `kind` field of an event."""

    ESTIMATED = "estimated"
    RESUMED = "resumed"
    WORKER_JOINED = "worker joined"
    WORKER_READY = "worker ready"
    WORKER_RECOVERED = "worker recovered"
    WORKER_LOST = "worker lost"
    WORKER_LEFT = "worker left"
    SCORING_LOST = "scoring lost"
    RANK_LOST = "rank lost"
    STEP = "step"
    WAITING = "waiting"
    PUBLISHED = "published"
    EVALUATED = "evaluated"
    NO_GRADIENT = "no gradient"
    REFUSED = "refused"
    ALARM = "alarm"
    RELEASED = "released"
    SAVED = "saved"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class EventSpec:
    """The meaning of an event kind.

    >>> EVENTS[EventKind.WORKER_LOST].trouble
    True
    """

    meaning: str
    action: str = ""
    """What to do about it; empty if nothing."""
    routine: bool = False
    """True if every run writes it; the report lists all other events as notes."""
    trouble: bool = False
    """True if the live view shows it as a warning."""


EVENTS: Final = {
    EventKind.ESTIMATED: EventSpec(
        "the memory of a step, term by term (`memory`), after the largest micro-batch was computed once to verify it "
        "(`worst_seconds`); on GPUs also the device plan (`devices`)",
        routine=True,
    ),
    EventKind.RESUMED: EventSpec("the run continues from a checkpoint at this step"),
    EventKind.WORKER_JOINED: EventSpec("on Ray: a node offers a slot, and a worker starts on it"),
    EventKind.WORKER_READY: EventSpec("a worker loaded this version and passed its probe", routine=True),
    EventKind.WORKER_RECOVERED: EventSpec(
        "a worker replaced its engine, reloaded its weights or cancelled a group that took too long; its prompts "
        "return to the queue",
        "nothing if it is rare; if it is frequent, read `why`",
        trouble=True,
    ),
    EventKind.WORKER_LOST: EventSpec(
        "a worker ended with an error; its prompts return to the queue, and another worker replaces it",
        "read `why`; after three failures in a row without a group, the worker is not replaced",
        trouble=True,
    ),
    EventKind.WORKER_LEFT: EventSpec("on Ray: a node or its slot left the cluster", "nothing if you removed it"),
    EventKind.SCORING_LOST: EventSpec(
        "on Ray: a scoring pool ended or stopped answering, and is restarted",
        "look for a reward function that hangs",
        trouble=True,
    ),
    EventKind.RANK_LOST: EventSpec(
        "on Ray: a trainer rank ended or stopped answering; all ranks end, and the run continues from the newest "
        "checkpoint",
        "if it happens often, it is usually memory: lower `trainer.token_budget`",
        trouble=True,
    ),
    EventKind.STEP: EventSpec(
        "a batch was trained: every metric, drift and gates by lag; how many groups were trained, how many of them are "
        "replays, their lags, groups retired by cause; rewards by version, seconds by phase so far",
        routine=True,
    ),
    EventKind.WAITING: EventSpec(
        "no group arrived for a minute or longer; names what is missing and which worker is responsible",
        "look at the workers it names",
        trouble=True,
    ),
    EventKind.PUBLISHED: EventSpec(
        "a version is in the weight log; `why` is first, period, drift, cost, longest or last", routine=True
    ),
    EventKind.EVALUATED: EventSpec(
        "pass rates of `version` with confidence intervals, always on the same prompts", routine=True
    ),
    EventKind.NO_GRADIENT: EventSpec(
        "no token of the batch would move the policy; the batch is replaced",
        "usually the prompts are too easy or too hard; if the gate stops every token, sync more often",
        trouble=True,
    ),
    EventKind.REFUSED: EventSpec(
        "groups whose log-probs or ratios are not finite are in quarantine; the step continues without them, or, if an "
        "update was made already, ends with it",
        "look at them: `offbeat view RUN --fate quarantined`",
        trouble=True,
    ),
    EventKind.ALARM: EventSpec("a health rule fired", "see the health rules"),
    EventKind.RELEASED: EventSpec("a paused run continues: the file `pause` was removed"),
    EventKind.SAVED: EventSpec(
        "a checkpoint is being written; `resume` uses the newest complete one", routine=True
    ),
    EventKind.FAILED: EventSpec(
        "the error that ended the run", "read `why`, fix it, then `offbeat resume`", trouble=True
    ),
    EventKind.ENDED: EventSpec(
        "why the run ended, its ledger, and its time by phase",
        "report a ledger that does not balance: it is a bug",
        routine=True,
    ),
}  # fmt: skip

ROUTINE: Final = frozenset(kind for kind, spec in EVENTS.items() if spec.routine)
TROUBLE: Final = frozenset(kind for kind, spec in EVENTS.items() if spec.trouble)
