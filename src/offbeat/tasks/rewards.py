"""Reward functions, and how they become one score: weighted, named, in range, or not a score at all.

A function written for TRL works unchanged: `from_trl(function)`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from offbeat.types import Json, Score, Unscorable

Columns = Mapping[str, Json]
Scorer = Callable[[str, Columns], float | Score | None]
"""A completion's text and the example's columns in; a reward, or None where this reward does not apply. May raise."""

Reason = Literal["timeout", "crash", "sandbox", "invalid"]

DETAIL_LIMIT: Final = 500
"""Characters of an error message that are kept."""


@dataclass(frozen=True)
class Reward:
    """One reward function with its weight. The function must be importable: it runs in another process.

    >>> def short(text, columns):
    ...     return 1.0 if len(text) < 20 else 0.0
    >>> Reward(short, weight=0.2).name
    'short'
    """

    function: Callable[..., object]
    name: str = ""
    """In the breakdown; the function's own name unless given."""
    weight: float = 1.0
    trl: bool = False
    """Whether it is called as TRL calls reward functions; see `from_trl`."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(_innermost(self.function), "__name__", ""))
        if not self.name:
            raise ValueError(
                f"{self.function!r} has no name of its own; give the reward one: Reward(f, name='correct')"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r} has weight {self.weight}; a weight is a finite number")

    def __call__(self, text: str, columns: Columns) -> object:
        """What the function says about one completion."""
        return _call_trl(self.function, self.name, text, columns) if self.trl else self.function(text, columns)


def from_trl(function: Callable[..., object], *, weight: float = 1.0, name: str = "") -> Reward:
    """A reward function with TRL's signature, unchanged: `(completions, **columns) -> list[float]`.

    It is called with lists of one entry. Where the prompt is a chat, completions are `[{"role": "assistant", ...}]`,
    as in TRL; `prompts` and every column are passed, and None means "does not apply". `async def` works.

    >>> def has_digit(completions, **kwargs):
    ...     return [float(any(c.isdigit() for c in text)) for text in completions]
    >>> grade([from_trl(has_digit)], (0, 1), "it is 7", {"prompt": "3+4="})
    Score(reward=1.0, breakdown={'has_digit': 1.0})
    """
    state = inspect.signature(function).parameters.get("trainer_state")
    if state is not None and state.default is inspect.Parameter.empty:
        raise ValueError(
            f"{_innermost(function)!r} needs TRL's trainer_state, which does not exist where rewards are computed "
            "apart from training; give it a default, or compute the reward without it"
        )
    return Reward(function, name, weight, trl=True)


def _innermost(function: Callable[..., object]) -> object:
    """The function within partials."""
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
        raise TypeError(f"{name} returned {rewards!r:.200} for one completion; TRL's signature returns a list of one")
    return rewards[0]


def grade(
    rewards: Sequence[Reward], reward_range: tuple[float, float], text: str, columns: Columns
) -> Score | Unscorable:
    """One completion through all reward functions: the weighted sum, and the parts that sum to it.

    A function that raises leaves the completion without a score, never with 0:

    >>> def correct(text, columns):
    ...     return float(int(text) == columns["answer"])
    >>> grade([Reward(correct)], (0, 1), "42", {"answer": 42})
    Score(reward=1.0, breakdown={'correct': 1.0})
    >>> grade([Reward(correct)], (0, 1), "forty-two", {"answer": 42}).reason
    'crash'
    """
    parts: dict[str, float] = {}
    for reward in rewards:
        try:
            said = reward(text, columns)
        except MemoryError:
            raise  # the process is no longer to be trusted with the next completion
        # The boundary to other people's reward functions: whatever they raise is the reason there is no score.
        except Exception as error:
            return Unscorable(_reason(error), f"{reward.name}: {type(error).__name__}: {error}"[:DETAIL_LIMIT])
        if said is None:
            continue
        try:
            parts |= _parts(reward, said)
        except (TypeError, ValueError) as error:
            return Unscorable("invalid", f"{reward.name} returned {said!r:.200}: {error}"[:DETAIL_LIMIT])
    return _sum(parts, rewards, reward_range)


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


def _parts(reward: Reward, said: object) -> dict[str, float]:
    """What one function contributes, by name."""
    if not isinstance(said, Score):
        return {reward.name: _finite(said) * reward.weight}
    if not said.breakdown:
        return {reward.name: _finite(said.reward) * reward.weight}
    given = {part: _finite(value) for part, value in said.breakdown.items()}
    if not math.isclose(math.fsum(given.values()), _finite(said.reward), rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(f"its parts sum to {math.fsum(given.values())!r}, not to its reward")
    return {f"{reward.name}.{part}": value * reward.weight for part, value in given.items()}


def _finite(value: object) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError("a reward is a number")
    number = float(value)  # type: ignore[arg-type]  # NumPy's and torch's scalars are numbers too
    if not math.isfinite(number):
        raise ValueError("a reward is a finite number")
    return number


def _reason(error: Exception) -> Reason:
    if isinstance(error, TimeoutError):
        return "timeout"
    # By name: the sandbox is one task's own business, and a scorer may bring another.
    return "sandbox" if any(kind.__name__ == "SandboxError" for kind in type(error).__mro__) else "crash"
