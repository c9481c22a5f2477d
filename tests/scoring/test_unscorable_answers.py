"""Answers made to be unscorable end soon: with a verdict, or with a blame that costs as much as a wrong answer."""

import time

import pytest

from lab.attacks.unscorable import ending, graded
from offbeat.tasks.python_code import program_in
from offbeat.types import Score, Unscorable
from tests.fixtures.attacks.unscorable_answers import COLUMNS, GRADERS, KNOWN, search

TEXTS = [(kind, text) for kind in ("number", "exact", "choice") for text in KNOWN[kind]]
SEARCHED = [(kind, text) for kind, text in search(120) if kind in ("number", "exact", "choice")]
SLOW = {"words", "digits", "power", "decimal", "fraction"}
"""Habits that compute until the deadline."""


def test_verifiers_and_extractors_take_milliseconds() -> None:
    for kind, text in TEXTS + SEARCHED:
        start = time.process_time()
        assert GRADERS[kind](text, COLUMNS[kind]) in (0.0, 1.0)
        assert time.process_time() - start < 0.5, (kind, text[:80])


def test_a_program_is_found_in_linear_time() -> None:
    for text in KNOWN["code"]:
        start = time.process_time()
        program_in(text)
        assert time.process_time() - start < 0.5, text[:80]


def test_a_reward_function_that_people_write_never_leaves_such_an_answer_without_a_score() -> None:
    texts = [text for text in KNOWN["own"] if text.split()[0] not in SLOW]
    found = graded("own", [*texts, "words " + "a" * 40], deadline=0.5)
    assert len(found) == len(texts) + 1 >= 15
    for entry in found:
        if isinstance(entry.outcome, Unscorable):  # 18 is right
            assert entry.outcome.blame == "right" and entry.text.endswith("18"), entry
        else:
            assert entry.outcome.reward == 0.0, entry
    assert ending(found[-1]) == "floor, timeout by the answer" and 0.2 < found[-1].cpu < 4.5
    assert {entry.outcome.fault for entry in found if isinstance(entry.outcome, Score)} >= {"crash", "invalid"}


@pytest.mark.engine
def test_formulas_that_hold_the_verifier_end_as_well() -> None:
    for entry in graded("math", KNOWN["math"][:13]):
        assert isinstance(entry.outcome, Score) and entry.outcome.reward == 0.0 and entry.cpu < 2.0, entry
