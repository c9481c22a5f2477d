"""Several turns: tokens of the environment are masked, and spans and limits hold."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.tasks.turns import Calculator, CalculatorError, Episode, Turn, calculate, play
from offbeat.types import Finish


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


class Scripted:
    """A policy that writes prepared lines, each with the next version."""

    def __init__(self, *lines: str, finish: Finish = Finish.STOP) -> None:
        self.lines: Iterator[str] = iter(lines)
        self.seen: list[str] = []
        self.finish = finish

    def __call__(self, so_far: Sequence[int]) -> Turn:
        self.seen.append(decode(so_far))
        line = next(self.lines)
        return Turn(encode(line), [-0.5] * len(line), version=len(self.seen), finish=self.finish)


def test_a_tool_is_called_and_its_reply_is_masked() -> None:
    policy = Scripted("17*25 is <calc>17*25</calc>", "so 425")
    episode = play(Calculator(), policy, encode, decode, max_tokens=200)
    answer = episode.completion("g/0")
    text = decode(answer.token_ids.tolist())
    assert text == "17*25 is <calc>17*25</calc><result>425</result>so 425"
    masked = "".join(c for c, own in zip(text, answer.loss_mask, strict=True) if not own)
    assert masked == "<result>425</result>" and policy.seen[1] == text.removesuffix("so 425")
    assert answer.finish is Finish.STOP
    assert [(s.version, s.start, s.end) for s in answer.versions] == [(1, 0, 47), (2, 47, 53)]
    assert all(p == 0.0 for p, own in zip(answer.behavior_logprobs, answer.loss_mask, strict=True) if not own)


def test_the_policy_reads_the_error_of_a_failing_tool_call() -> None:
    assert Calculator().reply("<calc>1/0</calc>") == "<error>division by zero</error>"
    assert "cannot read" in str(Calculator().reply("<calc>__import__('os')</calc>"))


@pytest.mark.parametrize(("max_tokens", "max_turns"), [(30, 8), (200, 1)], ids=["reply does not fit", "turns used up"])
def test_an_episode_that_hits_a_limit_is_truncated_after_the_policys_turn(max_tokens: int, max_turns: int) -> None:
    policy = Scripted("17*25 is <calc>17*25</calc>", "so 425")
    episode = play(Calculator(), policy, encode, decode, max_tokens=max_tokens, max_turns=max_turns)
    assert episode.finish is Finish.LENGTH and episode.loss_mask[-1] and len(policy.seen) == 1


def test_a_truncated_turn_ends_the_episode_without_a_tool_call() -> None:
    policy = Scripted("<calc>1+1</calc>", finish=Finish.LENGTH)
    assert all(play(Calculator(), policy, encode, decode, max_tokens=99).loss_mask)


def test_an_environment_that_replies_first_is_refused() -> None:
    with pytest.raises(ValueError, match="put that text in the prompt"):
        Episode().environment([1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        ("-2 - -3", "1"),
        ("7/2", "7/2"),
        ("8/2/2", "2"),
        ("2*(3+(4-1))", "12"),
        ("0.5+1", "3/2"),
    ],
)
def test_the_calculator_calculates(text: str, value: str) -> None:
    assert str(calculate(text)) == value


@given(st.text("0123456789+-*/(). eijax_'", max_size=40))
def test_the_calculator_answers_or_refuses_any_text(text: str) -> None:
    try:
        calculate(text)
    except CalculatorError as error:
        assert str(error)


@pytest.mark.parametrize("text", ["9" * 500, "(" * 5_000, "*".join(["9" * 90] * 30), "", "1 2", "2**3", "1e9"])
def test_the_calculator_refuses_large_or_invalid_expressions(text: str) -> None:
    with pytest.raises(CalculatorError):
        calculate(text)
