"""Several turns: an environment replies between generations, and its tokens are masked out of the loss.

`Calculator` is the example of an environment with a tool:

    policy writes    17*25 is <calc>17*25</calc>
    environment      <result>425</result>
    policy writes    The answer is 425.
    environment      None: the episode is over

All turns together are one completion. The environment's tokens have `loss_mask` False, log-prob 0 and the version of
the turn before them, so the version spans cover the whole completion.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Final, Protocol

import numpy as np

from offbeat.types import Completion, Finish, VersionSpan

_CALL: Final = re.compile(r"<calc>([^<]*)</calc>\s*$")
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([-+*/()]))")
_LONGEST_EXPRESSION: Final = 200
_LARGEST_RESULT: Final = 10**60


class Environment(Protocol):
    """Replies to the policy. Each episode has its own object, which may keep state."""

    def reply(self, text: str) -> str | None:
        """Return the reply to what the policy just wrote, or None to end the episode."""


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one generation."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int | Sequence[int]
    """The version of all tokens, or one per token: the weights may change during a turn."""
    finish: Finish = Finish.STOP


@dataclass
class Episode:
    """The turns and replies of one episode, in order.

    >>> episode = Episode()
    >>> episode.policy(Turn([5, 6], [-0.1, -0.2], version=3))
    >>> episode.environment([7, 7, 7])
    >>> episode.policy(Turn([8], [-0.3], version=4))
    >>> answer = episode.completion("g7/0")
    >>> answer.loss_mask.tolist(), answer.versions[1].version
    ([True, True, False, False, False, True], 4)
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = Finish.STOP

    def policy(self, turn: Turn) -> None:
        versions = [turn.version] * len(turn.token_ids) if isinstance(turn.version, int) else turn.version
        self._add(turn.token_ids, turn.logprobs, versions, from_policy=True)
        self.finish = turn.finish

    def environment(self, token_ids: Sequence[int]) -> None:
        """Add a reply of the environment. The policy writes first; what comes before it is the prompt."""
        if not self.versions:
            raise ValueError("the environment replied before the policy wrote anything; put that text in the prompt")
        self._add(token_ids, [0.0] * len(token_ids), self.versions[-1:] * len(token_ids), from_policy=False)

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, from_policy: bool
    ) -> None:
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"a turn of {len(token_ids)} tokens has {len(logprobs)} log-probs and {len(versions)} versions; "
                "it needs one of each per token"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [from_policy] * len(token_ids)
        self.versions += versions

    def completion(self, id_: str) -> Completion:
        """Return the whole episode as one completion without a score."""
        return Completion(
            id=id_,
            token_ids=np.array(self.token_ids, np.int32),
            behavior_logprobs=np.array(self.logprobs, np.float32),
            versions=_spans(self.versions),
            loss_mask=np.array(self.loss_mask, np.bool_),
            finish=self.finish,
        )


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    ends = chain(starts[1:], [len(versions)])
    return tuple(VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True))


def play(
    environment: Environment,
    generate: Callable[[Sequence[int]], Turn],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    max_tokens: int,
    max_turns: int = 8,
) -> Episode:
    """Alternate policy and environment until one of them ends the episode or a limit is reached.

    Args:
        environment: Replies to each turn.
        generate: Continues the completion. It receives token ids, so no text is tokenized twice.
        encode: Converts a reply to tokens.
        decode: Converts a turn to the text that the environment sees.
        max_tokens: For the whole episode; a reply that does not fit ends it as truncated.
        max_turns: Generations; a reply after the last one ends the episode as truncated.
    """
    episode = Episode()
    for turns_left in reversed(range(max_turns)):
        turn = generate(episode.token_ids)
        episode.policy(turn)
        if turn.finish is Finish.LENGTH:
            return episode
        reply = environment.reply(decode(turn.token_ids))
        if reply is None:
            return episode
        reply_ids = encode(reply)
        if not turns_left or len(episode.token_ids) + len(reply_ids) >= max_tokens:
            break  # the policy could not write anything after the reply
        episode.environment(reply_ids)
    episode.finish = Finish.LENGTH
    return episode


class Calculator:
    """An environment that evaluates `<calc>…</calc>`; a turn without a call ends the episode.

    >>> calculator = Calculator()
    >>> calculator.reply("17 times 25 is <calc>17*25</calc>")
    '<result>425</result>'
    >>> calculator.reply("The answer is 425.") is None
    True
    """

    def reply(self, text: str) -> str | None:
        """Return the result of the call at the end of the text, or None if there is no call."""
        call = _CALL.search(text)
        if call is None:
            return None
        try:
            return f"<result>{calculate(call[1])}</result>"
        except CalculatorError as error:
            return f"<error>{error}</error>"


class CalculatorError(ValueError):
    """The expression cannot be calculated. The policy reads the message."""


def calculate(text: str) -> Fraction:
    """Calculate + - * / and brackets exactly. The text is parsed, never evaluated as code.

    >>> str(calculate("2*(3+4) - 1/2"))
    '27/2'
    """
    if len(text) > _LONGEST_EXPRESSION:
        raise CalculatorError(f"too long: {len(text)} characters, at most {_LONGEST_EXPRESSION}")
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if found is None:
            raise CalculatorError(f"cannot read {text[at:].strip()[:20]!r}")
        tokens.append(found[1] or found[2])
        at = found.end()
    value, rest = _sum(tokens)
    if rest:
        raise CalculatorError(f"cannot read {' '.join(rest)[:20]!r}")
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Return the value of the sum at the start, and the tokens after it; so do `_product` and `_term`."""
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        right, after = _product(rest[1:])
        value, rest = (value + right if rest[0] == "+" else value - right), after
    return value, rest


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, rest = _term(tokens)
    while rest and rest[0] in "*/":
        right, after = _term(rest[1:])
        if rest[0] == "/" and right == 0:
            raise CalculatorError("division by zero")
        value, rest = (value * right if rest[0] == "*" else value / right), after
        if max(abs(value.numerator), value.denominator) > _LARGEST_RESULT:
            raise CalculatorError("the result is too large")
    return value, rest


def _term(tokens: list[str]) -> tuple[Fraction, list[str]]:
    match tokens:
        case ["-", *rest]:
            value, rest = _term(rest)
            return -value, rest
        case ["(", *rest]:
            value, rest = _sum(rest)
            if not rest or rest[0] != ")":
                raise CalculatorError("a bracket is not closed")
            return value, rest[1:]
        case [number, *rest] if number[0].isdigit():
            return Fraction(number), rest
    raise CalculatorError("a number is missing")
