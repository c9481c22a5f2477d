"""No engine gets a prompt over the limit, and the run says how many are left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.config import Config, parse
from offbeat.errors import PromptTooLong
from offbeat.events import EventKind
from offbeat.rollout.prompt_leases import PromptLeases
from offbeat.run.desk import FittingPrompts, prompt_limit
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation.rates import evaluation_prompts
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.tasks.data import Example
from offbeat.tasks.task import Task
from tests.fixtures.tiny_model import load_tokenizer, save_model
from tests.run.digits_task import task as digits

LENGTHS = [2, 9, 3, 8, 4, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def config(model: Path, limit: int, **more: Any) -> Config:
    engine = {"kind": "hf", "max_prompt_tokens": limit}
    return parse({"model": {"path": str(model)}, "engine": engine, "sampling": {"max_tokens": 5}, **more})


def a_task(lengths: list[int]) -> Task:
    """Prompts of these lengths: one character is one token of the tiny model."""
    return replace(digits, examples=[Example(f"p{n}", "1" * n, {"answer": 0}) for n in lengths], evaluation=None)


def test_long_prompts_are_skipped_and_counted_once_each(model: Path) -> None:
    said: list[tuple[int, str]] = []
    asked = config(model, 7)
    order = FittingPrompts(
        asked, a_task(LENGTHS), load_tokenizer(model), ("prompts",), lambda *found: said.append(found)
    )
    leases = PromptLeases(order, name="r", seed=0, seconds=10)
    taken = leases.take(9, 0.0, "a", 0)
    assert sorted(len(lease.prompt.token_ids) for lease in taken) == [2, 2, 2, 3, 3, 3, 4, 4, 4], "three epochs"
    assert [count for count, _ in said] == [1], "the second and third are counted, and said with the 10th"
    assert "and the limit is 7" in said[0][1] and "raise engine.max_prompt_tokens" in said[0][1]
    again = PromptLeases(order, name="r", seed=0, seconds=10)
    again.restore(leases.state())
    assert [one.group_id for one in again.take(9, 0.0, "a", 0)] == [one.group_id for one in taken]


def test_a_task_without_a_prompt_that_fits_is_refused_at_once(model: Path) -> None:
    with pytest.raises(PromptTooLong, match=r"all 6 prompts of task .* have more than 1 tokens; raise engine\.max"):
        FittingPrompts(config(model, 1), a_task(LENGTHS), load_tokenizer(model), ("prompts",), lambda *_: None)


def test_evaluation_leaves_the_same_prompts_out(model: Path) -> None:
    asked = config(model, 7, evaluation={"every": 1, "prompts": 6, "samples": 1})
    found = evaluation_prompts(asked, a_task(LENGTHS), load_tokenizer(model), 0)
    assert sorted({len(one.prompt.token_ids) for one in found}) == [2, 3, 4]
    with pytest.raises(PromptTooLong, match="for evaluation"):
        evaluation_prompts(config(model, 1), a_task(LENGTHS), load_tokenizer(model), 0)


def test_the_context_of_the_model_limits_prompts_too(model: Path) -> None:
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert prompt_limit(config(model, 10_000)) == context - 5
    assert prompt_limit(config(model, 7)) == 7


@pytest.mark.engine
def test_a_run_with_transformers_trains_no_long_prompt_and_says_so(model: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "examples = [{'prompt': '1' * n} for n in (2, 3, 9)]\n"
        "def reward(text, columns):\n    return float(any(c.isdigit() for c in text))\n"
    )
    asked = config(
        model, 5, steps=2, prompts_per_step=3, group_size=4, task={"name": str(tmp_path / "task.py"), "scorers": 1}
    )
    directory = RunDirectory(tmp_path / "run")
    directory.create(asked)
    train(asked, directory)
    events = list(read(directory.events))
    [left_out] = [event for event in events if event["kind"] == EventKind.LEFT_OUT]
    assert left_out["count"] == 1 and "has 9 tokens" in left_out["why"]
    assert sum(event["kind"] == EventKind.STEP for event in events) == 2
