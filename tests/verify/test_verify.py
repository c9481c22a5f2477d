"""A right answer is accepted in any spelling, a wrong one never, and a list of guesses is wrong."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.verify import UnreadableReference, choice, exact, final_number, numeric
from offbeat.verify.extract import final_answers
from offbeat.verify.numbers import quantity
from tests.fixtures.attacks.answer_cheats import CHOICES, NUMBERS
from tests.fixtures.attacks.hostile_answers import hostile
from tests.fixtures.gsm8k_spellings import SPELLINGS, Spelling

WHOLE = st.integers(-(10**12), 10**12)
SPELLED = st.sampled_from(SPELLINGS)
MANY = settings(max_examples=300, deadline=None)


@MANY
@given(WHOLE, SPELLED)
def test_every_spelling_of_a_number_is_accepted(value: int, spelling: Spelling) -> None:
    assert numeric(spelling.write(Decimal(value)), str(value))
    assert numeric(spelling.write(Decimal(value)), f"{value:,}")


@MANY
@given(WHOLE, WHOLE, SPELLED)
@example(18, 1800, next(s for s in SPELLINGS if s.name == "boxed percentage"))
def test_no_spelling_of_another_number_is_accepted(value: int, other: int, spelling: Spelling) -> None:
    assert numeric(spelling.write(Decimal(other)), str(value)) is (value == other)


@MANY
@given(st.decimals(-(10**6), 10**6, places=1), st.integers(-20, 20), SPELLED)
def test_decimals_are_compared_exactly(value: Decimal, tenths: int, spelling: Spelling) -> None:
    other = value + Decimal(tenths) / 10
    assert numeric(spelling.write(other), str(value)) is (tenths == 0)


@MANY
@given(st.integers(-999, 999), st.integers(1, 99), st.integers(1, 9))
def test_fractions_are_equal_by_value(numerator: int, denominator: int, factor: int) -> None:
    unreduced = rf"\boxed{{\frac{{{numerator * factor}}}{{{denominator * factor}}}}}"
    assert numeric(unreduced, f"{numerator}/{denominator}")
    assert not numeric(unreduced, f"{numerator + 1}/{denominator}")


@MANY
@given(st.lists(st.integers(0, 999), min_size=2, max_size=8, unique=True), st.sampled_from([" ", ", ", "\n", " or "]))
def test_a_list_of_guesses_is_wrong_even_if_the_first_or_last_is_right(numbers: list[int], gap: str) -> None:
    dump = gap.join(map(str, numbers))
    boxes = gap.join(rf"\boxed{{{n}}}" for n in numbers)
    sentences = gap.join(f"The answer is {n}." for n in numbers)
    marks = "\n".join(f"#### {n}" for n in numbers)
    for text in (boxes, sentences, marks, rf"\boxed{{{dump}}}", f"<answer>{boxes}</answer>"):
        assert not any(numeric(text, str(n)) for n in (numbers[0], numbers[-1]))
    if gap != "\n":  # on separate lines, only the last line is the answer
        assert not any(numeric(dump, str(n)) for n in (numbers[0], numbers[-1]))


@MANY
@given(st.text(max_size=300), st.sampled_from(["18", "-3/4", "20%"]))
def test_any_text_is_judged_true_or_false(text: str, reference: str) -> None:
    assert numeric(text, reference) in (True, False)
    assert choice(text, "B") in (True, False)
    assert exact(text, "Paris") in (True, False)


@pytest.mark.parametrize("text", NUMBERS)
def test_a_cheat_is_wrong(text: str) -> None:
    assert not numeric(text, "18")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("I count 12... \\boxed{12}. So, \\boxed{12.0}", "12"),
        ("### 1. Add\n#### 2. Multiply\nSo the total is 18 dollars.", "18"),
        ("The answer is clear from the table.\nAnswer: 18", "18"),
        ("The final answer to the question is 18 eggs.", "18"),
        ("Answer (in dollars): 18", "18"),
        ("Great, that makes $18!", "18"),
        ("So she has 2½ cups.", "2.5"),
        ("So she has 2 1/2 cups.", "5/2"),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        ("Answer: minus 7 degrees", "-7"),
        ("Answer: -$7.50", "-7.5"),
        ("Answer: 1.5 million dollars", "1500000"),
        ("Answer: $1.5M", "1,500,000"),
        (r"\boxed{1.5 \times 10^{6}}", "1500000"),
        (r"\boxed{45^\circ}", "45"),
        ("Answer: 20%", "20"),
        ("Answer: 20 percent", "0.2"),
        ("Answer: 0.2", "20%"),
        ("Answer: 5 km", "5 kilometers"),
        ("Answer: 3 p.m.", "3"),
        ("Answer: US$18", "18"),
        ("Answer: 1\u202f234", "1234"),
    ],
)
def test_common_spellings_are_understood(text: str, reference: str) -> None:
    assert numeric(text, reference)


def test_units_are_compared_if_both_are_known() -> None:
    assert not numeric("Answer: 5 miles", "5 km")
    assert not numeric("Answer: 18 cents", "$18")
    assert numeric("Answer: 5", "5 km") and numeric("Answer: 5 parsecs", "5 km")


def test_a_percent_sign_is_a_unit_for_large_references_and_hundredths_for_small_ones() -> None:
    assert not numeric("Answer: 2000%", "20") and not numeric("Answer: 0.2%", "0.2")


def test_the_tolerance_is_relative_and_off_by_default() -> None:
    assert not numeric("Answer: 0.333", "1/3")
    assert numeric("Answer: 0.333", "1/3", tolerance=0.01) and not numeric("Answer: 0.32", "1/3", tolerance=0.01)


@pytest.mark.parametrize("reference", ["", "see above", "18 or 19", "9" * 50])
def test_a_reference_that_is_not_a_number_is_an_error_and_not_a_zero(reference: str) -> None:
    with pytest.raises(UnreadableReference, match="reference answer"):
        numeric("Answer: 18", reference)


@pytest.mark.parametrize(
    "text",
    [
        "B",
        "(B)",
        "b",
        "b)",
        "**B**",
        r"\boxed{B}",
        r"\boxed{\text{(B)}}",
        "The answer is B.",
        "Answer: B) a dog",
        "The correct answer is option B.",
        "The answer is B because cats purr.",
        "<answer>B</answer>",
        "Answer: B. None of the above",
    ],
)
def test_a_chosen_letter_is_found(text: str) -> None:
    assert choice(text, "B") and choice(text, "(b)") and not choice(text, "A")


@pytest.mark.parametrize("text", CHOICES)
def test_a_cheat_is_not_a_choice(text: str) -> None:
    assert not choice(text, "B")


def test_a_reference_that_is_not_an_option_is_an_error() -> None:
    with pytest.raises(UnreadableReference, match="options ABCD"):
        choice("B", "E", options="ABCD")
    with pytest.raises(UnreadableReference, match="empty"):
        exact("B", " ")


def test_words_are_compared_exactly_except_for_markup() -> None:
    assert exact("Answer: **Paris**", "Paris") and exact("Paris.", "Paris")
    assert not exact("Answer: paris", "Paris") and not exact("Paris or Rome", "Paris") and not exact("", "Paris")


def test_the_number_for_majority_votes_has_one_spelling() -> None:
    assert {final_number(text) for text in ("#### 1,200", r"\boxed{1200.0}", "It is $1200.")} == {"1200"}
    assert final_number("17 or 18") is None and final_number("") is None


def test_only_the_text_after_the_thinking_counts() -> None:
    assert final_answers("<think>\\boxed{1}</think>\n\\boxed{2}") == ("2",)


def test_a_quantity_is_exact() -> None:
    found = quantity("0.1")
    assert found is not None and found.value == Fraction(1, 10)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in hostile()], ids=lambda v: v[:40])
def test_hostile_text_costs_milliseconds(name: str, text: str) -> None:
    start = time.process_time()
    for judge, reference in ((numeric, "5"), (choice, "B"), (exact, "Paris")):
        assert judge(text, reference) in (True, False)  # type: ignore[operator]
    assert time.process_time() - start < 0.1, name
