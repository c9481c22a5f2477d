"""Groups of several turns, with an engine and an environment."""

import asyncio

import numpy as np

from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.generation import Episodes
from offbeat.types import UNKNOWN, Finish, Prompt
from tests.fixtures.simulation.scripted_engine import ScriptedEngine, bigrams

SAMPLING = Sampling(max_tokens=60, stop_token_ids=(1,))


class Echo:
    """Reply twice, then end the episode."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def reply(self, text: str) -> str | None:
        self.texts.append(text)
        return "5 6" if len(self.texts) < 3 else None


def played(size: int = 6) -> tuple:
    engine = ScriptedEngine(16)
    episodes = Episodes(
        lambda prompt: Echo(),
        encode=lambda text: [int(word) for word in text.split()],
        decode=lambda ids: " ".join(map(str, ids)),
    )
    request = Request("g", [3], size, SAMPLING, seed=4)
    return asyncio.run(episodes.play(engine, Prompt("p", [3], "t"), request))


def test_turns_and_replies_are_one_completion_with_the_replies_masked() -> None:
    answers = played()
    assert [one.id for one in answers] == [f"g/{i}" for i in range(6)]
    done = [one for one in answers if one.finish is Finish.STOP]
    assert done
    for one in done:
        replies = one.token_ids[~one.loss_mask]
        assert replies.tolist() == [5, 6, 5, 6]
        assert one.versions[0].version == 0 and one.versions[-1].end == len(one.token_ids)


def test_policy_tokens_have_the_log_probs_of_their_whole_context() -> None:
    table = bigrams((), 16)
    for one in played():
        path = [3, *one.token_ids.tolist()]
        expected = np.where(one.loss_mask, table[path[:-1], path[1:]], 0.0)
        assert one.behavior_logprobs is not UNKNOWN
        np.testing.assert_allclose(one.behavior_logprobs, expected, atol=1e-5)


def test_the_same_request_gives_the_same_group() -> None:
    assert played() == played()


def test_the_token_limit_covers_the_whole_episode() -> None:
    assert all(len(one.token_ids) <= SAMPLING.max_tokens for one in played(12))
