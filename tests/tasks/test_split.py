"""Training and evaluation share no prompt: in every task and data set of the repository, and for any data."""

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import TaskError
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.data import Example
from offbeat.tasks.gsm8k import gsm8k
from offbeat.tasks.rewards import Reward
from offbeat.tasks.split import (
    evaluation_set,
    evaluation_set_of_model,
    for_evaluation,
    hold_out,
    prompt_hash,
)
from offbeat.tasks.task import Task, custom
from tests.fixtures.repository_tasks import tasks_of_the_repository
from tests.scoring import scorers

datasets = pytest.importorskip("datasets")


def task_of(prompts: list[str]) -> Task:
    examples = [Example(f"e{n}", prompt, {"number": n}) for n, prompt in enumerate(prompts)]
    return Task("words", examples, (Reward(scorers.one),))


def prompts_of(task: Task) -> list[str]:
    return [str(example.prompt) for example in task.examples]


def asked_of(task: Task) -> list[str]:
    assert task.evaluation is not None
    return prompts_of(task.evaluation)


def shared_prompts(task: Task) -> int:
    """Return how many training examples have a prompt that evaluation asks: 0 after `hold_out`."""
    asked = {prompt_hash(example) for example in task.evaluation.examples} if task.evaluation is not None else set()
    return sum(prompt_hash(example) in asked for example in task.examples)


def test_no_task_of_the_repository_shares_a_prompt_between_training_and_evaluation(tmp_path: Path) -> None:
    checked = {name: hold_out(task) for name, task in tasks_of_the_repository(tmp_path, size=25)}
    assert len(checked) >= 20
    assert {name: shared for name, task in checked.items() if (shared := shared_prompts(task))} == {}
    asking = [name for name, task in checked.items() if task.evaluation is not None and len(task.evaluation.examples)]
    assert len(asking) >= 18, "a task with nothing to ask shares nothing by accident"


@settings(deadline=None)
@given(st.lists(st.text("ab 1", max_size=4), min_size=1, max_size=80), st.sampled_from([None, 0.1, 0.5, 0.9]))
def test_every_distinct_prompt_is_on_exactly_one_side(prompts: list[str], share: float | None) -> None:
    task = hold_out(task_of(prompts), share)
    trained, asked = ({prompt_hash(e) for e in part.examples} for part in (task, task.evaluation or task))
    assert trained | asked == {prompt_hash(e) for e in task_of(prompts).examples} and trained
    assert shared_prompts(task) == 0
    assert len(asked) == len(task.evaluation.examples), "distinct prompts only"  # type: ignore[union-attr]


def test_the_order_and_the_columns_of_the_data_do_not_matter() -> None:
    prompts = [f"question {n}" for n in range(100)]
    assert asked_of(hold_out(task_of(prompts))) == asked_of(hold_out(task_of(prompts[::-1] + prompts)))


def test_prompts_stay_on_their_side_if_data_are_added() -> None:
    few, many = (asked_of(hold_out(task_of([f"question {n}" for n in range(size)]))) for size in (300, 3_000))
    of_few = [prompt for prompt in many if int(prompt.split()[1]) < 300]
    both = min(len(few), len(of_few))
    assert few[:both] == of_few[:both] and both > 15, "they are asked in the same order, and only the end moves"
    assert len(few) == 30 and len(many) == 300


def test_data_with_too_few_prompts_are_trained_on_and_evaluation_says_so(caplog: pytest.LogCaptureFixture) -> None:
    task = hold_out(task_of([f"q{n % 7}" for n in range(50)]))
    asked = evaluation_set(task, 64, seed=0)
    assert len(task.examples) == 50 and asked.held_out is False
    assert "'words': 7 distinct prompts are too few to hold any out" in caplog.text
    assert len(asked.examples) == len({example.prompt for example in asked.examples}) == 7


def test_one_digit_sums_have_100_prompts_however_many_examples_there_are() -> None:
    task = hold_out(arithmetic(digits=1))
    assert len(asked_of(task)) == 20 and len(set(prompts_of(task))) == 80
    assert len(evaluation_set(task, 64, seed=0).examples) == 20


def test_evaluation_examples_of_a_file_are_asked_and_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "examples = [{'prompt': f'q{n}'} for n in range(6)]\n"
        "def evaluation_examples():\n    return [{'prompt': 'Q5'}, {'prompt': 'new'}, {'prompt': 'new'}]\n"
        "def reward(text, columns):\n    return 1.0\n"
    )
    with caplog.at_level(logging.WARNING):
        task = hold_out(custom(path=str(file)))
        assert prompts_of(task) == ["q0", "q1", "q2", "q3", "q4"] and sorted(asked_of(task)) == ["Q5", "new"]
    assert "'mine': 1 of 6 examples also occur among the evaluation examples" in caplog.text


def test_evaluation_examples_that_leave_nothing_to_train_on_are_refused() -> None:
    task = task_of(["a", "b"])
    with pytest.raises(TaskError, match="all 2 training prompts also occur among the evaluation"):
        len(hold_out(task.evaluated_on(lambda: task.examples)).examples)


def saved(place: Path, **splits: list[str]) -> str:
    rows = {name: [{"question": q, "answer": "#### 1"} for q in questions] for name, questions in splits.items()}
    datasets.DatasetDict({name: datasets.Dataset.from_list(one) for name, one in rows.items()}).save_to_disk(str(place))
    return str(place)


def test_the_test_split_of_a_data_set_is_asked_without_what_is_also_in_the_train_split(tmp_path: Path) -> None:
    questions = [f"How much is {n}?" for n in range(30)]
    task = hold_out(gsm8k(source=saved(tmp_path / "both", train=questions[:20], test=questions[15:])))
    assert len(task.examples) == 15 and len(asked_of(task)) == 15 and shared_prompts(task) == 0
    assert {example.id.rpartition("-")[0] for example in task.evaluation.examples} == {"gsm8k-test"}  # type: ignore[union-attr]
    validation = hold_out(gsm8k(source=saved(tmp_path / "validation", train=questions[:20], validation=questions[20:])))
    assert len(validation.examples) == 20 and len(asked_of(validation)) == 10
    train_only = hold_out(gsm8k(source=saved(tmp_path / "train", train=questions)))
    assert len(train_only.examples) == 24 and len(asked_of(train_only)) == 6


def test_a_model_is_asked_the_test_split_or_first_what_a_run_would_hold_out(tmp_path: Path) -> None:
    task = task_of([f"question {n}" for n in range(100)])
    asked = evaluation_set_of_model(task, 30)
    assert asked.held_out is None and len(asked.examples) == 30
    assert [str(example.prompt) for example in asked.examples[:20]] == asked_of(hold_out(task))
    both = gsm8k(source=saved(tmp_path / "both", train=["a", "b"], test=["c"]))
    assert [example.id for example in evaluation_set_of_model(both, 30).examples] == ["gsm8k-test-0"]
    assert len(for_evaluation(both).examples) == 1


def test_what_was_trained_on_elsewhere_is_not_asked() -> None:
    task = task_of([f"question {n}" for n in range(100)])
    first, *rest = asked_of(hold_out(task))
    assert asked_of(hold_out(task, trained_before=lambda example: example.prompt == first)) == rest
