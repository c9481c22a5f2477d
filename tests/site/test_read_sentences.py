"""The list of sentences that said something else than the command of their row."""

from pathlib import Path

import pytest

from lab.figures import ROOT
from lab.site import read_sentences
from lab.site.pages import rows
from lab.site.read_sentences import WrongSentence, citing, wrong_sentences


def test_every_listed_sentence_has_a_page_a_row_and_what_the_command_did() -> None:
    found = wrong_sentences()
    assert len(found) == len(set(found)) >= 20
    for one in found:
        assert (ROOT / one.page).is_file() and one.row in rows() and one.said and one.did


def test_a_page_that_was_fixed_does_not_say_it_again() -> None:
    returned = [one for one in wrong_sentences() if one.now and not one.fixed]
    assert returned == []


def test_a_sentence_is_fixed_if_the_page_says_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_sentences, "ROOT", tmp_path)
    one = WrongSentence("page.md", "TRL with the same vLLM", "TRL generates with transformers", "TRL alone", "x.1")
    texts = ("TRL with the\nsame vLLM", "TRL", "TRL\nalone")
    states = []
    for text in texts:
        (tmp_path / "page.md").write_text(text)
        states.append(one.fixed)
    assert states == [False, False, True]


def test_sentences_with_a_figure_or_a_row_count() -> None:
    text = "No figure here.\n\nIt takes 3.5 s.\n\n- [much](measured/run.md#run.1.bitwise)\n\n```\n7.5 s\n```\n"
    assert citing("docs/page.md", text) == ["It takes 3.5 s.", "- [much](measured/run.md#run.1.bitwise)"]
