"""Formulas are compared by value, expensive ones never reach sympy, and an unreadable reference is an error."""

import json
import time
from pathlib import Path

import pytest

from offbeat.errors import TaskError
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.data import rows
from offbeat.tasks.task import make
from offbeat.types import Score
from offbeat.verify import UnreadableReference
from offbeat.verify.latex import screen
from tests.fixtures.attacks.hostile_answers import (
    EQUAL_IN_DISGUISE,
    LEFT_TO_THE_DEADLINE,
    PAST_THE_SCREEN,
    SCREENED,
    honest,
    hostile,
)

pytest.importorskip("math_verify", reason="needs offbeat[math]")

from offbeat.tasks.latex_math import correct, examples
from offbeat.verify.latex import equivalent, final_formula


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\frac{2}{4}", r"\frac12"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", r"\dfrac{1}{2}"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
        ("(x-1)(x+1)", "x^2 - 1"),
        ("5", "x = 5"),
        ("x=5", "5"),
        (r"\left( 1, 2 \right]", "(1,2]"),
        (r"\{2, 1\}", r"\{1,2\}"),
        (r"1{,}234", "1234"),
        (r"\$18.00", "18"),
        (r"90^\circ", "90"),
        (r"12\text{ cm}", "12"),
        (r"2^{2024}", r"2 \cdot 2^{2023}"),
        (r"\text{Monday}", r"\text{Monday}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"e^{-x^2}", r"\frac{1}{e^{x^2}}"),
        (r"\binom{10}{3}", "120"),
        ("10!", "3628800"),
    ],
)
def test_equal_formulas_are_equal(answer: str, reference: str) -> None:
    assert equivalent(rf"So the answer is $\boxed{{{answer}}}$.", reference)
    assert equivalent(rf"So the answer is ${answer}$.", reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1,2,3,4,5", "5"),
        (r"4\text{ or }5", "5"),
        (r"\{4, 5\}", "5"),
        ("4 = 5", "5"),
        ("1=2=3=4=5", "5"),
        (r"5\text{ is not it}", "5"),
        (r"\text{not } 5", "5"),
        (r"x \neq 5", "x = 5"),
        (r"x \geq 5", "x = 5"),
        ("5x", "5"),
        ("5+x", "5"),
        (r"\pm 5", "5"),
        (r"\frac{5}{0}", "5"),
        (r"\text{nan}", "5"),
        ("x", "5"),
        ("[1,2]", "(1,2]"),
        ("-x^2 + 1", "x^2 - 1"),
        (r"\emptyset", "5"),
        (r"\infty", "5"),
        (r"\text{the reference}", "5"),
        ("x^2-x=0", "x^3-x=0"),
    ],
)
def test_a_cheat_or_a_wrong_formula_is_not_equal(answer: str, reference: str) -> None:
    assert not equivalent(rf"\boxed{{{answer}}}", reference)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{4}\boxed{5}",
        r"\boxed{5} or \boxed{6}",
        "The answer is $4$. The answer is $5$.",
        "1 2 3 4 5",
        "",
        r"\boxed{5",
        "".join(rf"\boxed{{{n}}}" for n in range(9)),
        "The answer is $4$ or $5$.",
        "<answer>4</answer><answer>5</answer>",
    ],
)
def test_several_different_answers_are_wrong(text: str) -> None:
    assert not equivalent(text, "5")


def test_boxes_with_equal_formulas_are_one_answer() -> None:
    assert equivalent(r"So \boxed{\frac12}, that is, \boxed{0.5}.", "1/2")


@pytest.mark.parametrize("reference", ["", r"\frac{", r"\sqrt"])
def test_an_unreadable_reference_is_an_error_and_not_a_zero(reference: str) -> None:
    with pytest.raises(UnreadableReference, match="reference answer"):
        equivalent(r"\boxed{\frac{1}{3}}", reference)


def test_honest_answers_get_the_right_verdict() -> None:
    for text, reference, right in honest(150, seed=1):
        assert equivalent(text, reference) is right, f"{text} for {reference}"


@pytest.mark.parametrize("name", sorted(SCREENED))
def test_an_expensive_formula_never_reaches_sympy(name: str) -> None:
    assert screen(SCREENED[name])


@pytest.mark.parametrize(
    "latex",
    [
        r"\frac{-b \pm \sqrt{b^2-4ac}}{2a}",
        "2^{2024}-1",
        r"x^{100}+x^{99}",
        r"\frac{1}{1+\frac{1}{1+\frac{1}{x}}}",
        r"e^{-x^2}",
        r"(-\infty, -3) \cup (-3, 3) \cup (3, \infty)",
        r"\begin{pmatrix} 1&2&3\\4&5&6\\7&8&9 \end{pmatrix}",
        "100!",
        "(n+1)!",
        r"\frac{20!}{10! \cdot 10!}",
        r"\binom{2n}{n}",
        r"\sqrt{2+\sqrt{2+\sqrt{2}}}",
        r"\sin\left(\frac{\pi}{2}(x-1)\right)",
        r"\left\{ \frac{1}{2}, \frac{3}{4}, \sqrt{5} \right\}",
        r"|x-1|+|x+1|",
        "y = 3x^2 - 4x + 7",
        "10^{-9}",
        "(x^2+1)^{10}",
        "3.141592653589793238462643383279502884197169399375",
        r"\log_2 3",
        "7\\text{ apples and a pear}",
    ],
)
def test_ordinary_answers_pass_the_screen(latex: str) -> None:
    assert screen(latex) == ""


def test_the_families_of_hostile_answers_match_the_screen() -> None:
    assert len(hostile()) >= 60
    assert not any(screen(answer) for answer in PAST_THE_SCREEN.values())
    assert not any(screen(answer) for answer, _ in EQUAL_IN_DISGUISE.values())


def test_the_formula_for_majority_votes_has_no_spaces() -> None:
    assert final_formula(r"\boxed{ x + 1 }") == final_formula("The answer is $x+1$.") == "x+1"


@pytest.mark.parametrize(
    "answer",
    [
        "(x+y+z+w+1.5)^{30}",
        r"\{(x+y+z+w+1.5)^{30}, 1\}",
        "((x+y+z+w+1.5)^{30}, 2)",
        "(x+y+z+w+1.5)^{30} = 0",
        r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7+\sqrt{11})^{30}",
    ],
)
def test_a_formula_with_too_many_terms_is_wrong_at_once(answer: str) -> None:
    start = time.process_time()
    assert not equivalent(rf"\boxed{{{answer}}}", "5")
    assert not equivalent(rf"\boxed{{{answer}}}", r"\{1, 2\}")
    assert time.process_time() - start < 1.0


def test_floats_are_compared_by_value_first_and_by_math_verify_if_they_are_close() -> None:
    assert equivalent(r"\boxed{0.5x}", r"\frac{x}{2}") and not equivalent(r"\boxed{0.6x}", r"\frac{x}{2}")
    assert equivalent(r"\boxed{1.5}", r"\frac32") and not equivalent(r"\boxed{1.501}", r"\frac32")


def test_the_task_reads_answers_or_boxed_solutions(tmp_path: Path) -> None:
    file = tmp_path / "two.jsonl"
    lines = [
        {"problem": "a", "solution": r"\boxed{1}, no: \boxed{\frac{1}{2}}", "level": 3},
        {"question": "b", "answer": "x", "level": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    task = make("math", {"source": str(file), "slice_by": "level"})
    assert [dict(example.columns) for example in task.examples] == [
        {"answer": r"\frac{1}{2}", "level": 3},
        {"answer": "x", "level": 1},
    ]
    assert correct(r"\boxed{0.5}", task.examples[0].record) == 1.0
    with pytest.raises(TaskError, match="needs a column 'answer'"):
        list(examples([{"problem": "c"}]))
    assert len(list(rows(file))) == 2


@pytest.mark.engine
def test_a_comparison_that_takes_too_long_is_the_answers_fault_and_the_next_one_has_its_score(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"problem": "a", "answer": "5"}))
    slow, reference = EQUAL_IN_DISGUISE["a zero of sines"]
    with ScoringPool.of(make("math", {"source": str(file)}), workers=1) as pool:
        first, second = pool.score_all([(rf"\boxed{{{slow}}}", {"answer": reference}), (r"\boxed{5}", {"answer": "5"})])
    assert first == Score(0.0, {"unscorable.timeout": 0.0})
    assert second == Score(1.0, {"correct": 1.0})


@pytest.mark.engine
def test_an_answer_that_could_take_hours_ends_at_the_deadline_with_the_lowest_reward(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"problem": "a", "answer": "5"}))
    asked = [(rf"\boxed{{{answer}}}", {"answer": "5"}) for answer in LEFT_TO_THE_DEADLINE.values()]
    with ScoringPool.of(make("math", {"source": str(file)}), workers=2) as pool:
        *found, last = pool.score_all([*asked, (r"\boxed{5}", {"answer": "5"})])
    by_name = dict(zip(LEFT_TO_THE_DEADLINE, found, strict=True))
    assert [name for name, one in by_name.items() if not isinstance(one, Score) or one.reward] == []
    assert by_name["tower of nines"] == Score(0.0, {"unscorable.timeout": 0.0})
    assert last == Score(1.0, {"correct": 1.0})
