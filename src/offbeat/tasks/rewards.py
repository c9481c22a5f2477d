"""Reward functions, and how their weighted sum becomes a `Score`, or an `Unscorable` with a reason.

A function written for TRL works unchanged, and sees all completions of a prompt at once: `from_trl(function)`. What can
be no reward, and a reward outside its range, raises `InvalidReward`: a run ends, unless only one answer causes it.
"""

import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

from offbeat.errors import InvalidReward
from offbeat.secrecy import hide_secrets
from offbeat.types import REWARD_RULE, Json, Score, Unscorable, is_reward

Columns = Mapping[str, Json]
Reason = Literal["timeout", "crash", "sandbox", "invalid"]

AnswerFault = float | Literal["floor", "unscorable"]
"""What an answer gets that makes its own scoring fail: the lowest reward, this reward, or no score."""

DETAIL_LIMIT: Final = 500
"""Characters of an error message to keep."""
FOR_EVALUATION: Final = "offbeat.evaluation"
"""The column of a prompt that is scored by the reward functions of `Task.evaluation`. They do not see it."""
_TRL_PARAMETERS: Final = {"completions", "prompts", "completion_ids"}
OF_TRL: Final = _TRL_PARAMETERS | {"trainer_state", "log_extra", "log_metric"}
"""What TRL passes to a reward function beside the columns."""


@dataclass(frozen=True)
class Answers:
    """Completions of one prompt that are scored together.

    >>> Answers(["42", "41"], {"answer": "42"}).texts
    ['42', '41']
    """

    texts: Sequence[str]
    columns: Columns
    """Those of the prompt, with the prompt itself."""
    token_ids: Sequence[Sequence[int]] | None = None
    """The tokens of each completion; None if they are not known."""
    step: int = 0
    """The step of the policy that wrote them: the version."""
    steps: int = 0
    """The last step of the run; 0 if there is no run."""


@dataclass(frozen=True)
class RewardState:
    """What a TRL reward function gets as `trainer_state`: what is known where rewards are computed."""

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"trainer_state.{name} is not known where rewards are computed, apart from training; global_step, the "
            "version that wrote the completions, and max_steps are"
        )


@dataclass(frozen=True)
class Reward:
    """One reward function with its weight. It runs in another process, so that process must be able to import it.

    >>> def short(text, columns):
    ...     return 1.0 if len(text) < 20 else 0.0
    >>> Reward(short, weight=0.2).name
    'short'
    """

    function: Callable[..., object]
    """Takes the completion's text and the example's columns. Returns a number, a `Score`, or None if it does not apply;
    raises if it cannot grade."""
    name: str = ""
    """Its name in the breakdown; by default the name of the function or class."""
    weight: float = 1.0
    trl: bool = False
    """True if it takes the arguments of a TRL reward function; see `from_trl`."""
    setup: Callable[[], object] | None = None
    """Called once in each scoring process before the first completion, for instance to load a model."""
    files: Sequence[str | os.PathLike[str]] = ()
    """Data files that the function reads. A run resumes only if they are what they were."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a reward must be a function, not {self.function!r:.80}")
        if not self.name:
            object.__setattr__(self, "name", _name(self.function))
        try:
            finite = math.isfinite(self.weight)
        except (TypeError, ValueError, OverflowError):
            finite = False
        if not finite:
            raise ValueError(f"reward {self.name!r} has weight {self.weight!r:.80}; a weight must be a finite number")
        object.__setattr__(self, "weight", float(self.weight))  # NumPy's, too
        if not self.trl and (problem := _call_problem(self.function)):
            right = f"from_trl({self.name})" if _is_trl(self.function) else f"{self.name}(text, columns)"
            raise ValueError(f"reward {self.name!r} cannot take a text and columns ({problem}); write {right}")

    def __call__(self, text: str, columns: Columns) -> object:
        return self.on(Answers([text], columns))[0]

    def on(self, answers: Answers) -> list[object]:
        """Return what the function says about each of these completions, which a TRL function sees all at once."""
        if self.trl:
            return _call_trl(self.function, self.name, answers)
        return [_awaited(self.function(text, answers.columns)) for text in answers.texts]


def from_trl(function: Callable[..., object], *, weight: float = 1.0, name: str = "") -> Reward:
    """Use a reward function with TRL's signature, `(completions, **columns) -> list[float]`, without changing it.

    It is called once for all completions of a prompt, with lists of that length: `prompts`, `completions`,
    `completion_ids` and every column; and with `trainer_state`, which has `global_step` and `max_steps`. Calls of
    `log_extra` and `log_metric` do nothing. If the prompt is a chat, a completion is `[{"role": "assistant", ...}]`.
    None and NaN mean "does not apply", as in TRL. `async def` works.

    >>> def has_digit(completions, **kwargs):
    ...     return [float(any(c.isdigit() for c in text)) for text in completions]
    >>> grade([from_trl(has_digit)], (0, 1), "it is 7", {"prompt": "3+4="})
    Score(reward=1.0, breakdown={'has_digit': 1.0})
    """
    return Reward(function, name, weight, trl=True)


def reward_of(function: Callable[..., object]) -> Reward:
    """Return a function as a `Reward`. TRL's signature is recognized by the names of the parameters.

    >>> def has_digit(completions, **kwargs):
    ...     return [float(any(c.isdigit() for c in text)) for text in completions]
    >>> reward_of(has_digit).trl
    True
    """
    return from_trl(function) if _is_trl(function) else Reward(function)


def _is_trl(function: Callable[..., object]) -> bool:
    """Return True for a parameter that TRL names, or for keywords only, which two positional arguments do not fit."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have none
        return False
    keywords = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return not _TRL_PARAMETERS.isdisjoint(parameters) or (keywords and bool(_call_problem(function)))


def _call_problem(function: Callable[..., object]) -> str:
    """Return why a function cannot take a text and columns, or nothing.

    >>> _call_problem(len), _call_problem(lambda text, columns: 1.0)
    ('too many positional arguments', '')
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return ""
    try:
        signature.bind("", {})
    except TypeError as error:
        return str(error)
    return ""


def _name(function: Callable[..., object]) -> str:
    """Return the name of a function, of the one inside nested partials, or of the class of another callable object."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return "reward" if name == "<lambda>" else name


def _call_trl(function: Callable[..., object], name: str, answers: Answers) -> list[object]:
    columns, count = answers.columns, len(answers.texts)
    prompt = columns.get("prompt", "")
    chat = not isinstance(prompt, str)
    given: dict[str, object] = {
        key: [value] * count for key, value in columns.items() if key not in ("prompt", "completion")
    } | {
        "prompts": [prompt] * count,
        "completions": [[{"role": "assistant", "content": one}] if chat else one for one in answers.texts],
        "trainer_state": RewardState(answers.step, answers.steps),
        "log_extra": _ignore,
        "log_metric": _ignore,
    }
    if answers.token_ids is not None:
        given["completion_ids"] = [list(one) for one in answers.token_ids]
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    rewards = _awaited(function(**given))
    if not isinstance(rewards, Iterable) or isinstance(rewards, (str, bytes, Mapping, Set)):
        raise InvalidReward(f"reward {name!r} returned {_shown(rewards)} for {count} completions; return a list")
    listed: list[object] = list(rewards)
    if len(listed) != count:
        raise InvalidReward(
            f"reward {name!r} returned {len(listed)} rewards for {count} completions, {_shown(listed)}; return one for "
            "each, and None where it does not apply"
        )
    return [None if _is_nan(one) else one for one in listed]


def _ignore(*given: object, **named: object) -> None:
    """Stand in for TRL's `log_extra` and `log_metric`: what a reward function logs is not kept."""


def _awaited(returned: object) -> object:
    if not inspect.iscoroutine(returned):
        return returned
    import asyncio  # not at the top: workers start often, and few need it

    return asyncio.run(returned)


def _is_nan(value: object) -> bool:
    try:
        return math.isnan(value)  # type: ignore[arg-type]  # NumPy and torch scalars too
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def grade(
    rewards: Sequence[Reward], reward_range: tuple[float, float], text: str, columns: Columns
) -> Score | Unscorable:
    """Score one completion with all reward functions: their weighted sum, and the parts that sum to it.

    If a function raises, there is no score. In a run, the scoring pool then finds out who caused it:

    >>> def correct(text, columns):
    ...     return float(int(text) == columns["answer"])
    >>> grade([Reward(correct)], (0, 1), "42", {"answer": 42})
    Score(reward=1.0, breakdown={'correct': 1.0})
    >>> grade([Reward(correct)], (0, 1), "forty-two", {"answer": 42}).reason
    'crash'
    """
    return examine(rewards, reward_range, Answers([text], columns))[0]


def examine(rewards: Sequence[Reward], reward_range: tuple[float, float], answers: Answers) -> list[Score | Unscorable]:
    """Score completions of one prompt like `grade`.

    A function that takes them one by one fails for one of them only; one that takes all of them fails for all.
    """
    parts: list[dict[str, float]] = [{} for _ in answers.texts]
    failed: dict[int, Unscorable] = {}
    for reward in rewards:
        calls = [range(len(parts))] if reward.trl else [[i] for i in range(len(parts)) if i not in failed]
        for places in calls:
            these = answers if reward.trl else Answers([answers.texts[places[0]]], answers.columns)
            try:
                returned = reward.on(these)
            except (MemoryError, InvalidReward):  # after the first this process cannot be trusted
                raise
            # The boundary to user code: whatever a reward function raises is the reason why there is no score.
            except Exception as error:
                failed |= dict.fromkeys(places, _failure(reward, error))
                continue
            for i, value in zip(places, returned, strict=True):
                if isinstance(value, Unscorable):
                    failed[i] = replace(value, detail=_shown(value.detail, str))
                elif value is not None and reward.weight:
                    parts[i] |= _parts(reward, value)
    return [failed.get(i) or _sum(parts[i], rewards, reward_range) for i in range(len(parts))]


def _failure(reward: Reward, error: Exception) -> Unscorable:
    reason: Reason = "timeout" if isinstance(error, TimeoutError) else "crash"
    # By name: a reward function may bring its own sandbox, and this module imports none.
    if any(kind.__name__ == "SandboxError" for kind in type(error).__mro__):
        reason = "sandbox"
    what = f"{reward.name}: {type(error).__name__}: {_shown(error, str)}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if one.filename != __file__ and Path(one.filename).parent.name != "asyncio"]
    lines = [frame.lineno for frame in theirs if frame.filename == theirs[0].filename]
    return Unscorable(reason, what + (f" ({Path(theirs[0].filename).name}, line {lines[-1]})" if lines else ""))


def fault_reward(fault: AnswerFault, reward_range: tuple[float, float]) -> float | None:
    """Return the reward of an answer that makes its own scoring fail, or None if it gets no score.

    A penalty may be below the range, because no reward function returns it. The floor of a range without a lower end is
    minus infinity; the scoring pool then takes the lowest reward that it has seen.

    >>> fault_reward("floor", (0.0, 1.0)), fault_reward(-0.5, (0.0, 1.0)), fault_reward("unscorable", (0.0, 1.0))
    (0.0, -0.5, None)
    >>> fault_reward(2.0, (0.0, 1.0))
    Traceback (most recent call last):
    ...
    ValueError: answer_fault = 2.0 must be 'floor', 'unscorable' or a number of at most 1, the highest reward
    """
    if fault == "unscorable":
        return None
    low, high = reward_range
    if fault == "floor":
        return float(low)
    if isinstance(fault, (str, bool)) or not -math.inf < fault <= high:
        raise ValueError(
            f"answer_fault = {fault!r} must be 'floor', 'unscorable' or a number of at most {high:g}, the highest "
            "reward"
        )
    return float(fault)


def _sum(
    parts: Mapping[str, float], rewards: Sequence[Reward], reward_range: tuple[float, float]
) -> Score | Unscorable:
    if not parts:
        names = ", ".join(reward.name for reward in rewards)
        none = f"no reward function applies to this completion: {names} returned None, as a function without `return`"
        return Unscorable("invalid", none)
    total, shown = _total(parts), dict(parts)
    if not all(map(is_reward, [total, *shown.values()])):
        return Unscorable("invalid", f"the reward is {total} from {shown}; {REWARD_RULE}"[:DETAIL_LIMIT])
    low, high = reward_range
    slack = 1e-9 * max(abs(low), abs(high))  # weights such as 0.7 + 0.2 + 0.1 do not sum to 1 in floating point
    if not low - slack <= total <= high + slack:
        wide = f"({min(low, math.floor(total)):g}, {max(high, math.ceil(total)):g})"
        raise InvalidReward(
            f"reward {total!r} is outside {low:g} to {high:g}: set reward_range={wide}, or the range that your rewards "
            f"can have, in the task file or as [task] options; its parts are {shown}"[:DETAIL_LIMIT]
        )
    return Score(min(max(total, low), high), shown)


def _parts(reward: Reward, returned: object) -> dict[str, float]:
    """Return the weighted contributions of one function, by name. They may be infinite or NaN."""
    if not isinstance(returned, Score):
        return {reward.name: _number(reward, returned) * reward.weight}
    if not returned.breakdown:
        return {reward.name: _number(reward, returned.reward) * reward.weight}
    parts = {part: _number(reward, value) for part, value in returned.breakdown.items()}
    whole, total = _number(reward, returned.reward), _total(parts)
    if math.isfinite(total) and not math.isclose(total, whole, rel_tol=1e-9, abs_tol=1e-9):
        raise InvalidReward(f"reward {reward.name!r} returned {_shown(returned)}: its parts sum to {total!r}")
    return {f"{reward.name}.{part}": value * reward.weight for part, value in parts.items()}


def _total(parts: Mapping[str, float]) -> float:
    try:
        return math.fsum(parts.values())
    except (ValueError, OverflowError):  # of infinities with two signs, and beyond the largest float
        return math.nan


def _number(reward: Reward, value: object) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # NumPy and torch scalars are fine too
    except OverflowError:  # an integer that no float can hold
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        raise InvalidReward(
            f"reward {reward.name!r} returned {_shown(value)}, a {type(value).__name__}, for one completion; return a "
            "number, a Score, or None if it does not apply"
        ) from None


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    """Return a value as text for a message, without secrets; its type if it cannot be shown, as 5,000 digits cannot."""
    try:
        return hide_secrets(show(value)[: 4 * DETAIL_LIMIT])[: DETAIL_LIMIT // 2]
    except Exception:  # the boundary to user code, whose __repr__ and __str__ may do anything
        return f"a {type(value).__name__} that cannot be shown"
