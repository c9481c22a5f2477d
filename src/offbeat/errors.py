"""Every error that a user may see, as one tree, and the hint for a mistyped name.

The message of an `OffbeatError` says what happened, the value found, and what to do. The command line prints it
without a traceback; in Python, `except offbeat.OffbeatError` catches all of them. Each class also keeps the built-in
base that fits it, so `except ValueError` and the like work as usual.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class OffbeatError(Exception):
    """Base class of all errors that offbeat raises on purpose."""


class ConfigError(OffbeatError, ValueError):
    """A configuration is invalid. `problems` lists everything wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"- {problem}" for problem in problems))


class ModelUnreadable(OffbeatError, ValueError):
    """A model directory has a broken file, or one that offbeat never opens: code, or pickled weights."""


class HubError(OffbeatError, ValueError):
    """A model of the hub cannot be found, downloaded, or used."""


class UnsupportedModel(OffbeatError, ValueError):
    """The trainer would compute wrong log-probs for this model."""


class CannotPlace(OffbeatError, ValueError):
    """A run does not fit on the given GPUs. `nearest` is the smallest change that makes it fit, or None."""

    def __init__(self, message: str, nearest: object = None) -> None:
        self.nearest = nearest
        super().__init__(message)


class UnreachableFunction(OffbeatError, ValueError):
    """Another process cannot import this function."""


class OwnPartError(OffbeatError, ValueError):
    """A part of your own, such as a gate or a sink, cannot be loaded, or does not do what is asked of it."""


class TaskError(OffbeatError, ValueError):
    """A task is not defined correctly."""


class DataError(TaskError):
    """Data cannot be read as examples."""


class PromptTooLong(DataError):
    """No prompt is within the length limit."""


class CannotImport(OffbeatError):
    """An import of rollouts cannot begin."""


class LogError(OffbeatError):
    """The experience log could not do what was asked."""


class LogWriteError(LogError):
    """A write failed and was not acknowledged. Earlier writes are safe, and repeating the call is harmless."""


class LogReadError(LogError):
    """The experience log could not be opened or read."""


class ConservationError(OffbeatError):
    """The ledger does not balance: the log names groups that it cannot account for."""


class WeightLogError(OffbeatError):
    """The weight log could not do what was asked."""


class DamagedFile(WeightLogError):
    """A file differs from what its publisher wrote. It was not used."""


class DamagedState(WeightLogError):
    """Tensors in memory differ from the published state. They were dropped; the next fetch starts over."""


class WrongBase(WeightLogError):
    """A patch was made for another base state."""


class AdapterMismatch(OffbeatError, ValueError):
    """An adapter does not fit its model."""


class VersionMissing(WeightLogError):
    """The log does not hold this version: it was removed, or never published."""


class VersionTaken(WeightLogError):
    """The log already holds this version, or a later one, with another state."""


class AnotherPublisher(WeightLogError):
    """Another process publishes to this log."""


class ProbeError(OffbeatError, ValueError):
    """A probe cannot be read, or was measured on other sequences."""


class ProbeFailed(OffbeatError, RuntimeError):
    """An engine's log-probs differ from the published ones even after a reload from an anchor."""


class EngineDead(OffbeatError, RuntimeError):
    """The engine cannot be used any more: close it and start another."""


class EngineAsleep(OffbeatError, RuntimeError):
    """The engine has let go of its device memory: wake it before it computes or loads."""

    def __init__(self) -> None:
        super().__init__("the engine sleeps; call wake() before generate, logprobs or load")


class WorkerFailed(OffbeatError, RuntimeError):
    """A rollout worker cannot continue."""


class FleetLost(OffbeatError, RuntimeError):
    """No worker is left; the message says why the last one failed."""


class SandboxError(OffbeatError, RuntimeError):
    """The sandbox failed, not the program. The completion gets no score: `Unscorable("sandbox")`."""


class SandboxMissing(SandboxError):
    """No sandbox is available here; nothing was run. The message says what to install."""


class SandboxStarved(SandboxError):
    """The machine gave a program too little CPU to be judged, three times. Run fewer things beside it."""


class PoolError(OffbeatError, RuntimeError):
    """The scoring pool cannot score."""


class PoolClosed(PoolError):
    """The scoring pool was closed before this completion was scored."""


class InvalidReward(PoolError, ValueError):
    """A reward function returned what can be no reward, or a reward outside its range. The run ends."""


class WorkerDoesNotStart(OffbeatError, RuntimeError):
    """A scoring worker died or took too long before it was ready."""


class RewardDoesNotImport(WorkerDoesNotStart):
    """A scoring worker could not import a reward function."""


class WorkerDoesNotEnd(OffbeatError, RuntimeError):
    """A scoring worker outlived SIGKILL, which happens when the kernel holds it, for example on a dead network disk."""


class PackingError(OffbeatError, ValueError):
    """A completion does not fit into any micro-batch."""


class NoGradient(OffbeatError, RuntimeError):
    """No token of the batch would have moved the policy. Nothing was changed."""


class UnfusedAttention(OffbeatError):
    """torch would compute attention on a GPU without its fused kernel."""


class StepOutOfMemory(OffbeatError, RuntimeError):
    """A training step does not fit into memory; the message names the largest terms."""


class CheckpointError(OffbeatError, RuntimeError):
    """A checkpoint cannot be written, read, or used for this run."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is incomplete, or differs from what was written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is complete but belongs to another run or model."""


class RankLost(OffbeatError, RuntimeError):
    """A trainer rank cannot continue, so none can. Resume from the newest checkpoint."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how
        super().__init__(f"rank {rank} {how}")

    def __reduce__(self) -> tuple[type["RankLost"], tuple[int, str]]:
        return type(self), (self.rank, self.how)  # by default an exception is rebuilt from its message alone


class RankDied(RankLost):
    """The process of a rank ended."""


class RankFailed(RankLost):
    """A rank raised an error."""


class RankSilent(RankLost):
    """The process of a rank runs but sends no heartbeat."""


class ActorSilent(OffbeatError, RuntimeError):
    """A Ray actor sends no heartbeat."""


class NotServable(OffbeatError, ValueError):
    """A preset or a setting that cannot run inside another trainer, with the reason."""


class RunError(OffbeatError, RuntimeError):
    """A run directory cannot be used as asked."""


class RunStopped(OffbeatError, RuntimeError):
    """The run ended before its last step. `resume` continues from the newest checkpoint."""


class WaitExpired(OffbeatError, RuntimeError):
    """A wait of the run passed its deadline; the message names what it waited for and which worker is responsible."""


class DeadlinePassed(OffbeatError, TimeoutError):
    """A call passed its deadline; the message names the call and how long it took."""


def first_line(error: BaseException, longest: int = 300) -> str:
    """Return the first line of another library's error, or its class if it has no message: for one-line sentences.

    >>> first_line(ValueError("torn\\n  at byte 7")), first_line(KeyError())
    ('torn', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:longest]


def suggest_nearest(word: str, valid: Iterable[str]) -> str:
    """Return a hint: the closest valid name, or all of them if none is close.

    >>> suggest_nearest("rec-onside", ["grpo", "rec-oneside-is"])
    "did you mean 'rec-oneside-is'?"
    >>> suggest_nearest("x", ["grpo", "dapo"])
    'valid: grpo, dapo'
    """
    known = list(valid)
    close = nearest(word, known)
    return f"valid: {', '.join(known)}" if close is None else f"did you mean {close!r}?"


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the valid name that is most like a word, or None if none is as similar as `cutoff`."""
    close = get_close_matches(word, valid, n=3, cutoff=cutoff)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # swapped letters are the likeliest slip
    return close[0] if close else None
