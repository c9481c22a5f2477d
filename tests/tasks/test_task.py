"""Tasks: the order is a permutation that needs no memory, rewards sum to scores, and TRL functions work unchanged."""

import asyncio
import inspect
import json
import math
from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import InvalidReward, TaskError, UnreachableFunction
from offbeat.imports import reference, resolve
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward, from_trl, grade
from offbeat.tasks.task import FACTORIES, Order, Task, make
from offbeat.types import Json, Score, Unscorable
from tests.fixtures.trl_rewards import CASES, Case, many_letters, sums_only
from tests.scoring import scorers

SUMS = [Example(f"e{n}", f"{n}+1=", {"answer": str(n + 1)}) for n in range(7)]
TASK = Task("sums", SUMS, (Reward(scorers.one),))


@settings(deadline=None)  # a shared machine may pause for longer than hypothesis allows
@given(size=st.integers(1, 300), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_each_epoch_visits_every_example_once(size: int, seed: int, epoch: int) -> None:
    order = Order(size, seed)
    visited = [order.index(position) for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(visited) == list(range(size))
    assert {order.epoch(position) for position in range(epoch * size, (epoch + 1) * size)} == {epoch}


@settings(deadline=None)
@given(start=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_resuming_from_a_position_continues_the_same_sequence(start: int, seed: int) -> None:
    whole = [example.id for example in islice(TASK.ordered(seed), 60)]
    assert [example.id for example in islice(TASK.ordered(seed, start), 60 - start)] == whole[start:]


def test_epochs_and_seeds_have_different_orders() -> None:
    def visited(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Order(50, seed).index(epoch * 50 + n) for n in range(50))

    assert len({visited(seed, epoch) for seed in range(10) for epoch in range(10)}) == 100


def test_every_position_gets_every_example_about_equally_often() -> None:
    size, seeds = 6, 3_000
    counts = Counter((place, Order(size, seed).index(place)) for seed in range(seeds) for place in range(size))
    expected = seeds / size
    chi2 = sum((counts[place, index] - expected) ** 2 / expected for place in range(size) for index in range(size))
    assert chi2 < 52.6  # the 99.9 % point for (6 - 1)² = 25 degrees of freedom; a biased shuffle is far beyond


def test_an_order_of_a_trillion_examples_needs_no_memory() -> None:
    order = Order(10**12, seed=1)
    assert len({order.index(position) for position in range(1_000)}) == 1_000
    assert order.index(10**12 - 1) < 10**12


def test_an_order_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to visit"):
        Order(0, seed=1)
    with pytest.raises(ValueError, match="positions start at 0"):
        Order(3, seed=1).index(-1)


def test_a_prompt_holds_everything_a_reward_function_needs() -> None:
    prompt = TASK.prompt(SUMS[3], [5, 6])
    assert prompt.columns == {"prompt": "3+1=", "answer": "4"} and prompt.task == "sums"
    assert prompt.token_ids.dtype == np.int32
    chat = Example("c", ({"role": "user", "content": "hi"},), {})
    assert json.loads(json.dumps(chat.record)) == {"prompt": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Task("t", SUMS, ()), "has no reward function"),
        (lambda: Task("t", SUMS, (Reward(scorers.one), Reward(scorers.one))), "two rewards of one name"),
        (lambda: Task("t", SUMS, (Reward(scorers.one),), reward_range=(1.0, 0.0)), "is empty"),
        (lambda: Example("e", "x", {"prompt": "y"}), "the prompt itself"),
    ],
)
def test_an_invalid_task_is_refused_with_a_reason(build: object, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        build()  # type: ignore[operator]


def test_several_rewards_are_weighted_and_named_and_sum_to_the_score() -> None:
    rewards = [Reward(scorers.one, "correct", 0.8), Reward(scorers.length, weight=0.2), Reward(scorers.act, weight=0.1)]
    score = grade(rewards, (0, 2), "print", {})
    assert isinstance(score, Score) and math.isclose(score.reward, math.fsum(score.breakdown.values()))
    assert score.breakdown == pytest.approx({"correct": 0.8, "length": 0.1, "act.a": 0.075, "act.b": 0.025})


def test_a_reward_that_does_not_apply_is_left_out() -> None:
    assert grade([Reward(scorers.one), Reward(scorers.act)], (0, 1), "none", {}) == Score(1.0, {"one": 1.0})
    assert grade([Reward(scorers.act)], (0, 1), "none", {}) == Unscorable(
        "invalid", "no reward function applies to this completion: act returned None, as a function without `return`"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("return nan", "invalid"),
        ("return inf", "invalid"),
        ("raise", "crash"),
        ("unsafe", "sandbox"),
        ("slow", "timeout"),
    ],
)
def test_a_completion_that_cannot_be_graded_has_a_reason_and_no_reward(text: str, reason: str) -> None:
    outcome = grade([Reward(scorers.one, weight=0.0), Reward(scorers.act)], (0, 1), text, {})
    assert isinstance(outcome, Unscorable) and outcome.reason == reason and outcome.detail


def test_a_breakdown_that_does_not_sum_to_its_reward_is_invalid() -> None:
    def wrong_sum(text: str, columns: object) -> Score:
        return Score(1.0, {"half": 0.5})

    with pytest.raises(InvalidReward, match=r"'wrong_sum' returned Score\(reward=1.0.*its parts sum to 0.5"):
        grade([Reward(wrong_sum)], (0, 1), "", {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_a_reward_function_written_for_trl_runs_unchanged(case: Case) -> None:
    batch = case.function(**case.batch())
    expected = asyncio.run(batch) if inspect.iscoroutine(batch) else batch
    outcomes = [grade([from_trl(case.function)], (0, 1), *pair) for pair in zip(case.texts, case.records, strict=True)]
    assert [outcome.reward if isinstance(outcome, Score) else None for outcome in outcomes] == expected
    assert len(set(expected)) > 1, "a case in which all answers score the same shows nothing"


def test_none_from_a_trl_function_means_not_applicable() -> None:
    record: dict[str, Json] = {"prompt": "x", "task": "essay"}
    assert grade([from_trl(sums_only), from_trl(many_letters)], (0, 1), "ab", record) == Score(
        0.2, {"many_letters": 0.2}
    )


def test_a_trl_function_that_returns_too_many_rewards_is_told_how_many() -> None:
    def two(completions: list[str], **kwargs: object) -> list[float]:
        return [1.0, 1.0]

    with pytest.raises(InvalidReward, match="'two' returned 2 rewards for 1 completions"):
        grade([from_trl(two)], (0, 1), "x", {})


def test_a_reference_resolves_to_the_function() -> None:
    nested = partial(partial(scorers.length, columns={"a": 1}))
    found = reference(nested)
    assert resolve(str(found["target"]), found["options"])(text="12345") == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "function",
    [lambda text, columns: 1.0, partial(scorers.one, "text"), partial(scorers.one, columns={"a": object()})],
    ids=["lambda", "positional", "not JSON"],
)
def test_a_function_that_no_other_process_can_import_is_refused(function: object) -> None:
    with pytest.raises(UnreachableFunction):
        reference(function)  # type: ignore[arg-type]


def test_every_task_name_leads_to_a_factory() -> None:
    for name, target in FACTORIES.items():
        assert callable(resolve(target)), name


def test_an_unknown_option_of_a_task_is_named() -> None:
    with pytest.raises(TaskError, match="digit"):
        make("arithmetic", {"digit": 2})
