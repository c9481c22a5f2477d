"""Several turns: tool calls between generations, and a loss mask on what the policy did not write.

An environment sees the policy's text and answers it, or ends the episode:

    policy writes    17*25 is <calc>17*25</calc>
    environment      <result>425</result>
    policy writes    The answer is 425.
    environment      None: the episode is over

All turns together are one completion. Tokens of the environment are in it with `loss_mask` False and log-prob 0, and
count to the version of the turn before them, so that spans cover the completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from offbeat.types import Completion, Finish, VersionSpan


class Environment(Protocol):
    """What answers the policy. One object per episode; it may keep state."""

    def reply(self, text: str) -> str | None:
        """The world's answer to what the policy just wrote; None ends the episode."""


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one go."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int | Sequence[int]
    """Of all its tokens, or of each: weights may change while a turn is written."""
    finish: Finish = Finish.STOP


@dataclass
class Episode:
    """Turns and replies in the order they came.

    >>> episode = Episode()
    >>> episode.policy(Turn([5, 6], [-0.1, -0.2], version=3))
    >>> episode.environment([7, 7, 7])
    >>> episode.policy(Turn([8], [-0.3], version=4))
    >>> answer = episode.completion("g7/0")
    >>> answer.loss_mask.tolist(), answer.versions[1]
    ([True, True, False, False, False, True], VersionSpan(version=4, start=5, end=6))
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = Finish.STOP

    def policy(self, turn: Turn) -> None:
        """Add what the policy wrote."""
        versions = [turn.version] * len(turn.token_ids) if isinstance(turn.version, int) else turn.version
        self._add(turn.token_ids, turn.logprobs, versions, written=True)
        self.finish = turn.finish

    def environment(self, token_ids: Sequence[int]) -> None:
        """Add what the environment said. The policy speaks first: the environment's first words are the prompt."""
        if not self.versions:
            raise ValueError("an environment replied before the policy wrote anything; put its words in the prompt")
        self._add(token_ids, [0.0] * len(token_ids), self.versions[-1:] * len(token_ids), written=False)

    def _add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, written: bool
    ) -> None:
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(token_ids)} tokens came with {len(logprobs)} log-probs and {len(versions)} versions; "
                "each token has one"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [written] * len(token_ids)
        self.versions += versions

    def completion(self, id_: str) -> Completion:
        """The whole episode as one completion, yet to be scored."""
        return Completion(
            id=id_,
            token_ids=np.array(self.token_ids, np.int32),
            behavior_logprobs=np.array(self.logprobs, np.float32),
            versions=_spans(self.versions),
            loss_mask=np.array(self.loss_mask, np.bool_),
            finish=self.finish,
        )


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Runs of equal versions.

    >>> _spans([3, 3, 4])
    (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    """
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
    """Let policy and environment speak in turn until one of them ends it, or a limit does.

    Args:
        environment: What answers.
        generate: Continues the completion so far, given as token ids: never re-tokenised text.
        encode: Tokens of a reply.
        decode: Text of what the policy wrote, shown to the environment.
        max_tokens: Of the whole episode; a reply that does not fit ends it as truncated.
        max_turns: Generations at most; a call for one more ends it as truncated.
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
        said = encode(reply)
        if not turns_left or len(episode.token_ids) + len(said) >= max_tokens:
            break  # nothing the policy could still say would follow
        episode.environment(said)
    episode.finish = Finish.LENGTH
    return episode
