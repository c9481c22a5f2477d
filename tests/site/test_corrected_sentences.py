"""Sentences that were wrong once are on their page, each with a test or a measured row behind it."""

import pytest

from lab.site.corrected import Corrected, sentences

SENTENCES = sentences()


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda one: f"{one.page}: {one.says[:40]}")
def test_a_corrected_sentence_is_on_its_page_and_has_evidence(sentence: Corrected) -> None:
    assert sentence.faults == []


def test_every_topic_is_covered() -> None:
    assert len(SENTENCES) == len(set(SENTENCES)) >= 40 and len({one.page for one in SENTENCES}) >= 9


def test_a_missing_sentence_test_or_row_is_found() -> None:
    page, there = SENTENCES[0].page, SENTENCES[0].evidence
    assert Corrected(page, "The earth is flat.", there).faults == [f"{page} does not say: The earth is flat."]
    for evidence in ("tests/run/test_cadence.py::test_nothing", "tests/nothing.py::test_nothing", "nothing.1.row"):
        assert Corrected(page, SENTENCES[0].says, evidence).faults == [f"there is no {evidence}"]
    assert Corrected(page, SENTENCES[0].says, "promises.3.lr-0.001-cost-4").faults == []
