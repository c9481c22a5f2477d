"""Every event a run writes to `events.jsonl`, declared once: its kind, what it means, and what to do about it.

The live view, the report and the reference page all read these declarations. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class EventKind(StrEnum):
    """The `kind` field of an event."""

    EVIDENCE = "evidence"
    ESTIMATED = "estimated"
    RESUMED = "resumed"
    CHANGED = "inputs changed"
    WORKER_JOINED = "worker joined"
    WORKER_READY = "worker ready"
    WORKER_RECOVERED = "worker recovered"
    WORKER_LOST = "worker lost"
    WORKER_LEFT = "worker left"
    SCORING_LOST = "scoring lost"
    RANK_LOST = "rank lost"
    STEP = "step"
    WAITING = "waiting"
    LEFT_OUT = "prompts left out"
    PUBLISHED = "published"
    WEIGHTS_REPAIRED = "weights repaired"
    EVALUATED = "evaluated"
    UNSCORABLE = "unscorable"
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
    fields: Mapping[str, str] = field(default_factory=dict)
    """Everything the event has besides `at`, `step` and `kind`, with its meaning."""


_WORKER: Final = {"worker": "its name"}
_WHY: Final = {"why": "the reason"}

EVENTS: Final = {
    EventKind.EVIDENCE: EventSpec(
        "a new run starts with a lag that is known to lose, which you accepted, or that nobody has shown to learn",
        "compare it with sync.every = 1",
        trouble=True,
        fields={"level": "known to lose, or nobody has shown it", "why": "what is known", "row": "the row of figures"},
    ),
    EventKind.ESTIMATED: EventSpec(
        "a process starts to drive the run, after the largest micro-batch was computed once to verify its memory",
        routine=True,
        fields={
            "memory": "the memory of a step, term by term",
            "worst_seconds": "seconds of the largest micro-batch",
            "steps": "the last step that was asked for",
            "devices": "on GPUs: the device plan",
        },
    ),
    EventKind.RESUMED: EventSpec(
        "the run continues from its newest checkpoint, at this step; without a checkpoint at step 0",
        fields={"why": "how many groups of the log, written after the checkpoint, need not be generated again"},
    ),
    EventKind.CHANGED: EventSpec(
        "the run continues although what it depends on has changed since its checkpoint, because you asked for that",
        "compare results before and after with care",
        trouble=True,
        fields={"what": "task data, source of reward functions, version of offbeat, or settings of [optimizer]"},
    ),
    EventKind.WORKER_JOINED: EventSpec("on Ray: a node offers a slot, and a worker starts on it", fields=_WORKER),
    EventKind.WORKER_READY: EventSpec(
        "a worker loaded a version and passed its probe", routine=True, fields=_WORKER | {"version": "the version"}
    ),
    EventKind.WORKER_RECOVERED: EventSpec(
        "a worker replaced its engine, reloaded its weights or cancelled a group that took too long; its prompts "
        "return to the queue",
        "nothing if it is rare; if it is frequent, read `why`",
        trouble=True,
        fields=_WORKER | _WHY,
    ),
    EventKind.WORKER_LOST: EventSpec(
        "a worker ended with an error; its prompts return to the queue, and another worker replaces it",
        "read `why`; after three failures in a row without a group, the worker is not replaced",
        trouble=True,
        fields=_WORKER | {"why": "the error"},
    ),
    EventKind.WORKER_LEFT: EventSpec(
        "on Ray: a node or its slot left the cluster", "nothing if you removed it", fields=_WORKER
    ),
    EventKind.SCORING_LOST: EventSpec(
        "on Ray: a scoring pool ended or stopped answering, and is restarted",
        "look for a reward function that hangs",
        trouble=True,
        fields={"pool": "its name"} | _WHY,
    ),
    EventKind.RANK_LOST: EventSpec(
        "on Ray: a trainer rank ended or stopped answering; all ranks end, and the run continues from the newest "
        "checkpoint",
        "if it happens often, it is usually memory: lower `trainer.token_budget`",
        trouble=True,
        fields={"rank": "its number"} | _WHY,
    ),
    EventKind.STEP: EventSpec(
        "a batch was trained",
        routine=True,
        fields={
            "metrics": "every metric that is known, by name",
            "by_lag": "drift and gates by lag bucket; `none` is the bucket of tokens of unknown lag",
            "lags": "the lag of each trained group, without groups of unknown lag",
            "groups": "how many groups were trained",
            "replayed": "how many of them are replays",
            "retired": "groups that will not be drawn again, by cause",
            "rewards": "mean reward and number of fresh groups, by oldest version",
            "seconds": "seconds by phase so far, of this process",
        },
    ),
    EventKind.WAITING: EventSpec(
        "no group arrived for a minute or longer; names what is missing and which worker is responsible",
        "look at the workers it names",
        trouble=True,
        fields={"why": "what is missing, for how long, and the groups in flight"},
    ),
    EventKind.LEFT_OUT: EventSpec(
        "prompts of the task are longer than the limit, so no engine gets them; written for the 1st, 10th, 100th … one",
        "raise `engine.max_prompt_tokens` if they are too many",
        trouble=True,
        fields={"count": "how many so far", "why": "the latest, with its length and the limit"},
    ),
    EventKind.PUBLISHED: EventSpec(
        "a version is in the weight log",
        routine=True,
        fields={
            "version": "the version",
            "why": "first, period, drift, cost, longest or last",
            "how": "anchor or patch",
            "bytes": "what was written",
            "changed": "values that differ from the version before",
        },
    ),
    EventKind.WEIGHTS_REPAIRED: EventSpec(
        "the weight log had lost the version that the checkpoint serves; its policy was published again as an anchor",
        "nothing for the run; if you did not remove files yourself, check the disk",
        trouble=True,
        fields={
            "version": "the version that was published",
            "why": "what was wrong with the weight log",
            "how": "anchor",
            "bytes": "what was written",
        },
    ),
    EventKind.EVALUATED: EventSpec(
        "a version was evaluated, always on the same prompts",
        routine=True,
        fields={
            "version": "the version",
            "prompts": "how many prompts were asked",
            "distinct": "how many of them differ",
            "samples": "sampled answers to each prompt",
            "held_out": "true if the run does not train on these prompts",
            "temperature": "of the sampled answers",
            "k": "that of pass@k and maj@k",
            "unscorable": "answers that could not be scored",
            "answer_faults": "answers that made their own scoring fail; they count with the task's answer_fault",
            "pass@1": "the rate with its 95 % interval: [value, low, high]",
            "mean reward": "likewise, as every other rate, such as `pass@4` and `greedy`",
        },
    ),
    EventKind.UNSCORABLE: EventSpec(
        "the scoring of completions failed since the step before",
        "look at the reasons; the metrics unscorable_share and answer_fault_share have the shares",
        routine=True,
        fields={
            "versions": "by the version that wrote the completions: how many were scored, and how many failed, by who "
            "is to blame (answer, grader, or a grader that fails on a right answer) and why"
        },
    ),
    EventKind.NO_GRADIENT: EventSpec(
        "no token of the batch would move the policy; the batch is replaced",
        "usually the prompts are too easy or too hard; if the gate stops every token, sync more often",
        trouble=True,
        fields=_WHY,
    ),
    EventKind.REFUSED: EventSpec(
        "groups whose log-probs or ratios are not finite are in quarantine; the step continues without them, or, if an "
        "update was made already, ends with it",
        "look at them: `offbeat view RUN --fate quarantined`",
        trouble=True,
        fields={"groups": "their ids, each with the reason"},
    ),
    EventKind.ALARM: EventSpec(
        "a health rule fired",
        "see the health rules",
        fields={"action": "warn, pause or stop", "says": "the rule, the value and advice", "groups": "of the batch"},
    ),
    EventKind.RELEASED: EventSpec("a paused run continues: the file `pause` was removed"),
    EventKind.SAVED: EventSpec(
        "a checkpoint is being written; `resume` uses the newest complete one", routine=True
    ),
    EventKind.FAILED: EventSpec(
        "the error that ended the run", "read `why`, fix it, then `offbeat resume`", trouble=True,
        fields={"error": "its class", "why": "its message"},
    ),
    EventKind.ENDED: EventSpec(
        "the run ended",
        "report a ledger that does not balance: it is a bug",
        routine=True,
        fields={
            "why": "the reason; empty after the last step",
            "finished": "true if nothing is left to train; false if it was stopped",
            "ledger": "the account of all groups in the log",
            "seconds": "seconds by phase, of this process",
            "rows": "how many rows each table of the log has: none may be lost",
        },
    ),
}  # fmt: skip

ROUTINE: Final = frozenset(kind for kind, spec in EVENTS.items() if spec.routine)
TROUBLE: Final = frozenset(kind for kind, spec in EVENTS.items() if spec.trouble)
