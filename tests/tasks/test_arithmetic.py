"""Arithmetic: the settings control the difficulty, answers are right, and only the right number scores."""

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import TaskError
from offbeat.tasks.arithmetic import Sums, arithmetic, correct, final_number
from offbeat.tasks.turns import calculate


@settings(deadline=None)
@given(
    digits=st.integers(1, 6),
    terms=st.integers(2, 5),
    operators=st.sampled_from(["+", "-", "*", "+-", "+-*"]),
    number=st.integers(0, 99),
)
def test_every_answer_agrees_with_the_calculator(digits: int, terms: int, operators: str, number: int) -> None:
    task = arithmetic(digits=digits, terms=terms, operators=operators, size=100)
    example = task.examples[number]
    prompt = cast("str", example.prompt)
    assert calculate(prompt.removesuffix("=")) == int(str(example.columns["answer"]))
    numbers = "".join(c if c.isdigit() else " " for c in prompt).split()
    assert len(numbers) == terms and all(len(text) == digits for text in numbers)
    assert correct(str(example.columns["answer"]), example.columns) == 1.0


def test_examples_depend_only_on_seed_and_number() -> None:
    assert Sums(3, 10, 2, 2, "+")[7] == Sums(3, 10_000, 2, 2, "+")[7] != Sums(4, 10, 2, 2, "+")[7]
    task = arithmetic(size=10)
    assert len(task.examples[2:5]) == 3 and task.examples[-1] == task.examples[9]
    with pytest.raises(IndexError):
        task.examples[10]


def test_a_chat_model_is_asked_in_words() -> None:
    example = arithmetic(chat=True).examples[0]
    assert not isinstance(example.prompt, str) and "What is" in example.prompt[0]["content"]


@pytest.mark.parametrize(
    "text", ["42", " 42\n", "it is 42.", "17+25=42", "= 42.00", "**42**", "$42$", "10042 no, 42", "042"]
)
def test_a_right_answer_is_accepted_in_any_form(text: str) -> None:
    assert correct(text, {"answer": "42"}) == 1.0


@pytest.mark.parametrize(
    "text", ["", "41", "-42", "42.5", "4 2", "forty-two", "42 or 43", "142", "42e3", " ".join(map(str, range(1, 101)))]
)
def test_a_wrong_or_missing_answer_scores_0(text: str) -> None:
    assert correct(text, {"answer": "42"}) == 0.0


def test_negative_answers_and_separators_are_read() -> None:
    assert final_number("so −1,234") == "-1234" and final_number("3-4=-1") == "-1" and final_number("5-3") == "3"


@settings(deadline=None)
@given(st.text("0123456789,.-− ab", max_size=300) | st.text(max_size=300))
def test_any_text_can_be_read_without_an_error(text: str) -> None:
    found = final_number(text)
    assert found is None or str(int(found)) == found


def test_a_broken_reference_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        correct("42", {"answer": "many"})


@pytest.mark.parametrize("settings_", [{"operators": "/"}, {"operators": ""}, {"digits": 0}, {"terms": 1}, {"size": 0}])
def test_a_setting_out_of_range_is_refused(settings_: dict[str, object]) -> None:
    with pytest.raises(TaskError):
        arithmetic(**settings_)  # type: ignore[arg-type]
