"""An evaluation counts only what the evaluated version wrote; the schedule skips nothing that is due."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import WaitExpired
from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import LockstepAdmission
from offbeat.run.desk import Desk
from offbeat.run.evaluation.leases import EvaluationLeases, EvaluationPrompt, EvaluationSchedule
from offbeat.run.evaluation.rates import EngineEvaluation
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan
from tests.fixtures.simulation import virtual_time


def asked(count: int) -> list[EvaluationPrompt]:
    return [EvaluationPrompt(i, Prompt(f"p{i}", [i], "t"), size=1, seed=i) for i in range(count)]


def answer(lease: PromptLease, versions: Sequence[int], reward: float = 1.0) -> Group:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    tokens = np.arange(len(versions))
    one = Completion(f"{lease.group_id}/0", tokens, -np.ones(len(versions)), spans, score=Score(reward))
    return Group(lease.group_id, lease.prompt, (one,))


def test_an_answer_with_a_token_of_another_version_is_asked_again() -> None:
    leases = EvaluationLeases(4, asked(2), seconds=10)
    one, two = leases.take(5, 0.0, "w", 4)
    leases.answer([answer(one, [4, 4]), answer(two, [4, 5])])
    assert leases.missing == 1
    [again] = leases.take(5, 1.0, "w", 4)
    assert again.group_id == two.group_id and again.seed == two.seed
    leases.answer([answer(again, [4], reward=0.0)])
    assert leases.missing == 0 and leases.rates()["pass@1"][0] == 0.5  # type: ignore[index]


def test_a_worker_that_is_gone_gives_its_evaluation_prompts_back_and_no_training_prompt_is_touched() -> None:
    async def go() -> list[str]:
        training = PromptLeases(lambda i: Prompt(f"p{i}", [i], "t"), name="g", seed=0, seconds=10)
        desk = Desk(training, LockstepAdmission(), asyncio.get_running_loop().time)
        await desk.evaluate(EvaluationLeases(0, asked(3), seconds=10))
        for name in ("a", "b"):
            await desk.serving(name, 0)
        await desk.take(2, "a")
        await desk.reclaim("a")
        taken = await desk.take(5, "b")
        assert desk.progress.in_flight == 0 and desk.admitted == 0 and training.state()["next"] == 0
        return [lease.group_id for lease in taken]

    assert virtual_time.run(go()) == ["evaluation-0-0", "evaluation-0-1", "evaluation-0-2"]


def test_an_evaluation_that_nobody_answers_ends_with_its_name() -> None:
    async def go() -> None:
        clock = asyncio.get_running_loop().time
        training = PromptLeases(lambda i: Prompt(f"p{i}", [i], "t"), name="g", seed=0, seconds=10)
        desk = Desk(training, LockstepAdmission(), clock)
        await EngineEvaluation(desk, lambda version: asked(3), 10, 100, clock)(7)

    with pytest.raises(WaitExpired, match="for 3 answers to evaluation prompts by version 7; in flight: none"):
        virtual_time.run(go())


@given(every=st.integers(1, 6), period=st.integers(1, 6), steps=st.integers(0, 40), crash=st.integers(0, 40))
def test_the_schedule_evaluates_versions_in_order_and_a_crash_changes_nothing(
    every: int, period: int, steps: int, crash: int
) -> None:
    def run(crash: int) -> list[int]:
        schedule, found = EvaluationSchedule(every), []
        for step in range(steps + 1):
            schedule.mark(step)
            version = schedule.begin(step - step % period)
            if version is not None and step == crash:  # under way when the checkpoint is saved
                saved, schedule = schedule.state(), EvaluationSchedule(every)
                schedule.restore(saved)
                version = schedule.begin(step - step % period)
            if version is not None:
                schedule.end()
                found.append(version)
        return found

    found = run(crash=-1)
    assert found == sorted(set(found)) and found[0] == 0 and run(crash) == found
    if period == 1:
        assert found == list(range(0, steps + 1, every))
