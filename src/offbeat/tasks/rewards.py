"""Reward functions, and how their weighted sum becomes a `Score`, or an `Unscorable` with a reason.

A function written for TRL works unchanged: `from_trl(function)`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from offbeat.types import Json, Score, Unscorable

Columns = Mapping[str, Json]
Reason = Literal["timeout", "crash", "sandbox", "invalid"]

AnswerFault = float | Literal["floor", "unscorable"]
"""What an answer gets that makes its own scoring fail: the lowest reward, this reward, or no score."""

DETAIL_LIMIT: Final = 500
"""Characters of an error message to keep."""
FOR_EVALUATION: Final = "offbeat.evaluation"
"""The column of a prompt that is scored by the reward functions of `Task.evaluation`. They do not see it."""
_TRL_PARAMETERS: Final = {"completions", "prompts", "completion_ids"}


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
    """Its name in the breakdown; by default the name of the function."""
    weight: float = 1.0
    trl: bool = False
    """True if it takes the arguments of a TRL reward function; see `from_trl`."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(_innermost(self.function), "__name__", ""))
        if not self.name:
            raise ValueError(f"{self.function!r} has no name; give the reward one: Reward(f, name='correct')")
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r} has weight {self.weight}; a weight must be finite")
        if not self.trl and (problem := _call_problem(self.function)):
            right = f"from_trl({self.name})" if _is_trl(self.function) else f"{self.name}(text, columns)"
            raise ValueError(f"reward {self.name!r} cannot take a text and columns ({problem}); write {right}")

    def __call__(self, text: str, columns: Columns) -> object:
        return _call_trl(self.function, self.name, text, columns) if self.trl else self.function(text, columns)


def from_trl(function: Callable[..., object], *, weight: float = 1.0, name: str = "") -> Reward:
    """Use a reward function with TRL's signature, `(completions, **columns) -> list[float]`, without changing it.

    The function receives lists of one entry: `prompts`, `completions` and every column. If the prompt is a chat, a
    completion is `[{"role": "assistant", ...}]`, as in TRL. None means "does not apply". `async def` works.

    >>> def has_digit(completions, **kwargs):
    ...     return [float(any(c.isdigit() for c in text)) for text in completions]
    >>> grade([from_trl(has_digit)], (0, 1), "it is 7", {"prompt": "3+4="})
    Score(reward=1.0, breakdown={'has_digit': 1.0})
    """
    state = inspect.signature(function).parameters.get("trainer_state")
    if state is not None and state.default is inspect.Parameter.empty:
        raise ValueError(
            f"{_innermost(function)!r} requires TRL's trainer_state, which offbeat does not have: rewards are computed "
            "outside the trainer. Give the parameter a default value"
        )
    return Reward(function, name, weight, trl=True)


def reward_of(function: Callable[..., object]) -> Reward:
    """Return a function as a `Reward`. TRL's signature is recognized by the name of the first parameter.

    >>> def has_digit(completions, **kwargs):
    ...     return [float(any(c.isdigit() for c in text)) for text in completions]
    >>> reward_of(has_digit).trl
    True
    """
    return from_trl(function) if _is_trl(function) else Reward(function)


def _is_trl(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have none
        return False
    return next(iter(parameters), "") in _TRL_PARAMETERS


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


def _innermost(function: Callable[..., object]) -> object:
    """Return the function inside nested partials."""
    inner: object = function
    while (wrapped := getattr(inner, "func", None)) is not None:
        inner = wrapped
    return inner


def _call_trl(function: Callable[..., object], name: str, text: str, columns: Columns) -> object:
    prompt = columns.get("prompt", "")
    chat = not isinstance(prompt, str)
    completion = [{"role": "assistant", "content": text}] if chat else text
    lists = {key: [value] for key, value in columns.items() if key not in ("prompt", "completion")}
    rewards = function(prompts=[prompt], completions=[completion], **lists)
    if inspect.iscoroutine(rewards):
        import asyncio  # not at the top: workers start often, and few need it

        rewards = asyncio.run(rewards)
    if not isinstance(rewards, Sequence) or len(rewards) != 1:
        raise TypeError(f"{name} returned {_shown(rewards)} for one completion; it must return a list of one reward")
    return rewards[0]


def grade(
    rewards: Sequence[Reward], reward_range: tuple[float, float], text: str, columns: Columns
) -> Score | Unscorable:
    """Score one completion with all reward functions: their weighted sum, and the parts that sum to it.

    If a function raises, the completion gets no score, and never 0:

    >>> def correct(text, columns):
    ...     return float(int(text) == columns["answer"])
    >>> grade([Reward(correct)], (0, 1), "42", {"answer": 42})
    Score(reward=1.0, breakdown={'correct': 1.0})
    >>> grade([Reward(correct)], (0, 1), "forty-two", {"answer": 42}).reason
    'crash'
    """
    return examine(rewards, reward_range, text, columns)[0]


def examine(
    rewards: Sequence[Reward], reward_range: tuple[float, float], text: str, columns: Columns
) -> tuple[Score | Unscorable, bool]:
    """Score like `grade`; also return True if a failure cannot be the answer's: a sandbox or system call failed, or the
    reward functions say that they do not apply."""
    parts: dict[str, float] = {}
    for reward in rewards:
        try:
            returned = reward(text, columns)
        except MemoryError:
            raise  # this process cannot be trusted with the next completion
        # The boundary to user code: whatever a reward function raises is the reason why there is no score.
        except Exception as error:
            reason = _reason(error)
            outside = reason == "sandbox" or (isinstance(error, OSError) and reason != "timeout")
            return Unscorable(reason, f"{reward.name}: {type(error).__name__}: {_shown(error, str)}"), outside
        if returned is None:
            continue
        try:
            parts |= _parts(reward, returned)
        except (TypeError, ValueError) as error:
            return Unscorable("invalid", f"{reward.name} returned {_shown(returned)}: {_shown(error, str)}"), False
    return _sum(parts, rewards, reward_range), not parts


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
        return Unscorable("invalid", f"no reward function applies to this completion: {names} returned None")
    total = math.fsum(parts.values())
    low, high = reward_range
    slack = 1e-9 * max(abs(low), abs(high))  # weights such as 0.7 + 0.2 + 0.1 do not sum to 1 in floating point
    if not low - slack <= total <= high + slack:
        return Unscorable("invalid", f"reward {total!r} is outside [{low:g}, {high:g}]: {dict(parts)}"[:DETAIL_LIMIT])
    return Score(min(max(total, low), high), dict(parts))


def _parts(reward: Reward, returned: object) -> dict[str, float]:
    """Return the weighted contributions of one function, by name."""
    if not isinstance(returned, Score):
        return {reward.name: _finite(returned) * reward.weight}
    if not returned.breakdown:
        return {reward.name: _finite(returned.reward) * reward.weight}
    parts = {part: _finite(value) for part, value in returned.breakdown.items()}
    if not math.isclose(math.fsum(parts.values()), _finite(returned.reward), rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(f"its parts sum to {math.fsum(parts.values())!r}, not to its reward")
    return {f"{reward.name}.{part}": value * reward.weight for part, value in parts.items()}


def _finite(value: object) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError("a reward must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]  # NumPy and torch scalars are fine too
    except OverflowError:  # an integer that no float can hold
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a reward must be a finite number")
    return number


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    """Return a value as text for a message; its type if it cannot be shown, for instance a number of 5,000 digits."""
    try:
        return show(value)[: DETAIL_LIMIT // 2]
    except Exception:  # the boundary to user code, whose __repr__ and __str__ may do anything
        return f"a {type(value).__name__} that cannot be shown"


def _reason(error: Exception) -> Reason:
    if isinstance(error, TimeoutError):
        return "timeout"
    # By name: a reward function may bring its own sandbox, and this module imports none.
    return "sandbox" if any(kind.__name__ == "SandboxError" for kind in type(error).__mro__) else "crash"
