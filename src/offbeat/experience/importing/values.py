"""Convert cells of imported rows to what the log holds, or raise `UnreadableCell` with the value found."""

import json
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.types import UNKNOWN, Finish, Json, Score, Unknown

Message = dict[str, str]
"""`role` and `content`."""
Tokens = NDArray[np.int32]

FINISHES: Final = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), Finish.STOP),
    **dict.fromkeys(("length", "max_tokens", "max_length"), Finish.LENGTH),
}
"""The words engines use for how a completion ended."""
SPEAKERS: Final = {"human": "user", "gpt": "assistant"}
"""Roles of messages that have other names elsewhere."""


class UnreadableCell(Exception):
    """No group can be made of these rows."""


def read_tokens(values: object, what: str) -> Tokens:
    """A list of token ids.

    >>> read_tokens([4, 2], "a completion")
    array([4, 2], dtype=int32)
    >>> read_tokens([4.5], "c7")
    Traceback (most recent call last):
    offbeat.experience.importing.values.UnreadableCell: c7 has float64 where whole numbers were meant as token ids
    """
    found = _array(values, what, "token ids")
    if found.size and found.dtype.kind not in "iu":
        raise UnreadableCell(f"{what} has {found.dtype.name} where whole numbers were meant as token ids")
    if found.size and (int(found.min()) < -(2**31) or int(found.max()) >= 2**31):
        raise UnreadableCell(f"{what} has token ids beyond 32 bits")
    return found.astype(np.int32)


def read_logprobs(values: object) -> NDArray[np.float32] | Unknown:
    """One log-prob a token, or unknown where there are none.

    >>> read_logprobs(None)
    <Unknown.UNKNOWN: 'unknown'>
    """
    if values is None:
        return UNKNOWN
    found = _array(values, "a completion", "log-probs")
    if found.size and found.dtype.kind not in "fiu":
        raise UnreadableCell(f"log-probs are {values!r:.80}; one number a token was meant")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which the door refuses
        return found.astype(np.float32)


def _array(values: object, what: str, meant: str) -> NDArray[np.generic]:
    if not isinstance(values, list):
        raise UnreadableCell(f"{what} has {values!r:.80} where a list of {meant} was meant")
    try:
        return np.asarray(values)
    except (ValueError, OverflowError) as error:  # lists of unequal length, numbers beyond 64 bits
        raise UnreadableCell(f"{what} has no flat list of {meant}: {error!s:.120}") from error


def read_finish(word: object) -> Finish:
    """How a completion ended; not said, it came to its end.

    >>> read_finish("max_tokens")
    <Finish.LENGTH: 'length'>
    """
    if word is None:
        return Finish.STOP
    finish = FINISHES.get(str(word).lower())
    if finish is None:
        raise UnreadableCell(f"a completion finished by {word!r:.80}; known are {', '.join(FINISHES)}")
    return finish


def read_score(reward: object) -> Score | None:
    """The reward as it is given: what is no finite number is refused at the door. None while it is awaited.

    >>> read_score(1), read_score(None)
    (Score(reward=1.0, breakdown={}), None)
    """
    if isinstance(reward, int):
        try:
            reward = float(reward)
        except OverflowError as error:
            raise UnreadableCell("a reward is a number too large to hold") from error
    return None if reward is None else Score(cast(float, reward))


def read_name(value: object, what: str) -> str:
    """A text that names something.

    >>> read_name(7, "task")
    Traceback (most recent call last):
    offbeat.experience.importing.values.UnreadableCell: the task is 7; a text was meant
    """
    if not isinstance(value, str):
        raise UnreadableCell(f"the {what} is {value!r:.80}; a text was meant")
    return value


def read_text(text: str) -> str:
    """Text that a tokenizer can take.

    >>> read_text("half a character: \\ud800")
    Traceback (most recent call last):
    offbeat.experience.importing.values.UnreadableCell: not valid Unicode: 'half a character: \\ud800'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableCell(f"not valid Unicode: {text!a:.80}") from error
    return text


def read_json(value: object) -> Json:
    """Plain JSON; dates and the like become text.

    >>> read_json((1, b"x"))
    [1, "b'x'"]
    """
    return cast(Json, json.loads(json.dumps(value, default=str)))


def read_messages(value: object, what: str) -> list[Message]:
    """Messages with a role and a text each, under the names people give them.

    >>> read_messages([{"from": "human", "value": "2 + 2 ="}], "the prompt")
    [{'role': 'user', 'content': '2 + 2 ='}]
    """
    messages: list[Message] = []
    for message in value if isinstance(value, list) else [value]:
        match message:
            case {"role": str(role), "content": str(content)} | {"from": str(role), "value": str(content)}:
                messages.append({"role": SPEAKERS.get(role, role), "content": read_text(content)})
            case _:
                raise UnreadableCell(f"{what} has message {message!r:.80}; a role and a text were meant")
    if not messages:
        raise UnreadableCell(f"{what} has no messages")
    return messages
