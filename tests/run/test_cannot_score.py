"""A reward function that fails ends the run with its own error, not with the loss of the workers."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

import offbeat
from offbeat.errors import ConfigError, InvalidReward, PoolError, TaskError
from offbeat.run.desk import Desk
from offbeat.run.fleet import Fleet, Member
from offbeat.run.journal import MemoryJournal, read
from offbeat.tasks.rewards import Reward, fault_reward
from offbeat.tasks.task import Task, make

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


class Broken:
    """A worker whose pool has ended."""

    groups = 0

    async def work(self) -> None:
        raise InvalidReward("reward 5.0 is outside 0 to 1: set reward_range=(0, 5)")

    async def nudge(self) -> None: ...

    async def close(self) -> None: ...

    def news(self) -> list[str]:
        return []


class EmptyDesk:
    workers: dict[str, int] = {}  # noqa: RUF012 - never written
    k = 0

    @property
    def progress(self) -> "EmptyDesk":
        return self

    async def reclaim(self, name: str) -> None: ...


def test_the_fleet_ends_at_once_with_the_error_of_the_scoring_pool() -> None:
    async def run() -> MemoryJournal:
        journal = MemoryJournal()
        fleet = Fleet(lambda name: cast(Member, Broken()), ["w0", "w1"], cast(Desk, EmptyDesk()), journal)
        fleet.start()
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidReward, match=r"^reward 5.0 is outside"):
            fleet.check()
        await fleet.close()
        return journal

    assert asyncio.run(run()).of("worker_lost") == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 5.0 * (text == columns['answer'])", r"^reward 5.0 is outside 0 to 1: set reward_range=\(0, 5\)"),
        (
            "return columns['solution'.lower()]",
            r"^reward: KeyError: 'solution' \(task.py, line 3\)\n100.0% of the last",
        ),
    ],
)
def test_a_run_ends_with_what_the_reward_function_did(body: str, says: str, tmp_path: Path) -> None:
    model = offbeat.tiny_model(tmp_path / "model")
    (tmp_path / "task.py").write_text(f"examples = {ROWS!r}\ndef reward(text, columns):\n    {body}\n")
    with pytest.raises(PoolError, match=says):
        offbeat.train(
            model={"path": model, "compute": "float32", "serve": "float32"},
            task={"name": str(tmp_path / "task.py")}, engine={"kind": "hf"}, steps=20, prompts_per_step=4, group_size=4,
            sampling={"max_tokens": 4}, out=tmp_path / "run", progress=False,
        )  # fmt: skip
    kinds = [event["kind"] for event in read(tmp_path / "run" / "events.jsonl")]
    assert kinds[-1] == "failed" and "worker_lost" not in kinds


@pytest.mark.engine
def test_trls_keywords_train_with_a_lambda(tmp_path: Path) -> None:
    run = offbeat.train(
        model=offbeat.tiny_model(tmp_path / "model"),
        reward_funcs=lambda completions, answer, **_: [float(t == a) for t, a in zip(completions, answer, strict=True)],
        train_dataset=ROWS, steps=1, prompts_per_step=4, num_generations=4, max_completion_length=4,
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert run.state == "finished" and {one.prompt.task for one in run.groups()} == {"reward"}


def test_one_thing_given_by_two_names_is_refused(tmp_path: Path) -> None:
    for given, says in [
        ({"reward": str.isdigit, "reward_funcs": str.isdigit}, "reward is given twice, also as reward_funcs"),
        ({"dataset": ROWS, "train_dataset": ROWS}, "dataset is given twice"),
    ]:
        with pytest.raises(ConfigError, match=says):
            offbeat.train("model", out=tmp_path / "run", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_every_task_takes_a_range_and_a_fault_as_options() -> None:
    task = make("arithmetic", {"reward_range": [0, 5], "answer_fault": -1})
    assert task.reward_range == (0.0, 5.0) and fault_reward(task.answer_fault, task.reward_range) == -1.0
    with pytest.raises(TaskError, match="reward_range = 5 must be two numbers"):
        make("arithmetic", {"reward_range": 5})


def test_a_penalty_below_the_range_is_stored_and_not_refused(tmp_path: Path) -> None:
    """It was: whole groups went to quarantine because one answer made its scoring fail."""
    from offbeat.config import parse
    from offbeat.run.build import RunContext
    from offbeat.run.directory import RunDirectory
    from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score

    task = Task("sums", [], (Reward(lambda text, columns: 1.0, name="any"),), answer_fault=-0.5)
    context = RunContext(parse({}), RunDirectory(tmp_path), task, cast("object", None))  # type: ignore[arg-type]
    (tmp_path / "environment.json").write_text('{"run": "r1"}')
    answers = [Score(1.0), Score(-0.5, {"unscorable.crash": -0.5})]
    made = tuple(Completion(f"g/{i}", [4], UNKNOWN, source="human", score=one) for i, one in enumerate(answers))
    with context.open_log(50, "test") as log:
        assert not log.append([Group("g", Prompt("p", [1], "sums"), made)]).refused
