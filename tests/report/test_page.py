"""The page says what a run was, whatever became of it, and nothing in it acts."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.report.page import write_report
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import FileJournal
from tests.report.hostile import make_hostile_run
from tests.report.made_run import make_run

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements, attributes and text; complains about elements that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.text += " ".join(data.split("\n"))


def page(*runs: RunDirectory, out: Path) -> Page:
    write_report([run.path for run in runs], out)
    return Page(out.read_text(encoding="utf-8"))


def test_a_finished_run_is_told_in_one_sentence_and_then_in_full(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one"), out=tmp_path / "report.html")
    sentence = "Learned from 0.25 to 1.00 (pass@1) in 8 steps with 4 publishes; generation-bound; books balance."
    assert sentence in found.text
    for part in ("Learning", "Lag and drift", "By lag", "Contrast", "Books", "Time", "Bytes published", "Health",
                 "Sample groups", "What was run", "Improvement at publishes"):  # fmt: skip
        assert part in found.text, part
    assert "16 generated = 12 trained + 0 waiting + 4 dropped (4 zero-variance) + 0 in flight" in found.text
    assert "17+25=" in found.text and "advantage +0.75" in found.text and "trained at step 1" in found.text
    assert "Over 3 publishes" in found.text and "1.4 kB in all" in found.text


def test_a_page_has_no_script_and_asks_for_nothing(tmp_path: Path) -> None:
    found = page(make_hostile_run(tmp_path / "one"), make_run(tmp_path / "two"), out=tmp_path / "report.html")
    assert not found.elements & {"script", "img", "link", "iframe", "object", "embed", "form", "a", "base"}
    names = {name for name, _ in found.attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href", "srcset", "action"}
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", written, re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    assert "default-src 'none'" in written


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    found = page(make_hostile_run(tmp_path / "one"), out=tmp_path / "report.html")
    written = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert all(c.isprintable() or c == "\n" for c in written)
    assert "<script>document.title='owned'</script>" in found.text and "{{ 7 * 7 }}" in found.text
    assert "<link rel=stylesheet href=http://evil.example/x.css>" in found.text
    assert "\\x1b" in found.text and "\\u202e" in found.text and "\\x9b" in found.text
    assert "999,300 more characters" in found.text and len(written) < 300_000
    assert "unscorable: crash" in found.text


@pytest.mark.parametrize("state", ["still running", "paused", "stopped", "broken off"])
def test_a_run_that_is_not_finished_says_so(tmp_path: Path, state: str) -> None:
    directory = make_run(tmp_path / "one", ended="the reason" if state == "stopped" else None)
    if state == "stopped":
        config = directory.path / "config.json"
        config.write_text(config.read_text().replace('"steps": 8', '"steps": 20'))
    if state == "paused":
        directory.pause.touch()
    if state in ("still running", "paused"):
        with RunLock(directory):
            found = page(directory, out=tmp_path / "report.html")
    else:
        found = page(directory, out=tmp_path / "report.html")
    assert f"; {state}" in found.text and ("the reason" in found.text) == (state == "stopped")


def test_a_run_without_evaluations_is_judged_by_its_training_reward(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one", evaluations=False), out=tmp_path / "report.html")
    assert "Training reward from 0.12 to 1.00 (no evaluations)" in found.text
    assert "set evaluation.every to get them" in found.text


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.create(make_run(tmp_path / "other").config())
    found = page(directory, out=tmp_path / "report.html")
    assert "No step has been made yet: the run is broken off" in found.text and "no experience log yet" in found.text
    with FileJournal(directory.events) as journal:
        journal.write("estimated", 0, memory="little")
    assert "No step has been made yet" in page(directory, out=tmp_path / "report.html").text


def test_an_offline_run_says_whose_groups_it_learned_from(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source")
    offline = make_run(
        tmp_path / "offline",
        run={"mode": "offline", "experience": str(source.experience)},
        sampler={"mode": "offline"},
    )
    found = page(offline, out=tmp_path / "report.html")
    assert "Offline: no workers" in found.text and "The log is shared" in found.text
    assert "nothing can be read off" in found.text


def test_with_sync_every_step_nothing_is_predicted_and_the_report_says_why(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one", every=1), out=tmp_path / "report.html")
    assert "there is nothing to predict" in found.text


def test_books_that_do_not_balance_are_shouted(tmp_path: Path) -> None:
    from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
    from offbeat.experience.log import ExperienceLog

    directory = make_run(tmp_path / "one")
    with ExperienceLog.open(directory.experience) as log:
        log.record([LedgerEvent("never appended", LedgerEventKind.TRAINED, step=3)])
    found = page(directory, out=tmp_path / "report.html")
    assert "the books do not balance." in found.text and "never appended" in found.text


def test_runs_are_compared_and_seeds_pooled(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"lag1-seed{s}", seed=s) for s in range(3)]
    found = page(*seeds, make_run(tmp_path / "lag3", every=4), out=tmp_path / "report.html")
    assert "4 runs of 2 configurations; last pass@1: lag1-seed 1.000 ± 0.000, lag3 1.000." in found.text
    assert "3 (0, 1, 2)" in found.text and "sync.every" in found.text
    assert found.text.count("Sample groups") == 4


def test_a_long_run_has_a_report_that_can_be_mailed(tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path / name) for name in ("long-0", "long-1")]
    for seed, directory in enumerate(runs):
        directory.create(parse({"steps": 6_000, "seed": seed, "sync": {"every": 2}}))
        with FileJournal(directory.events) as journal:
            for step in range(1, 6_001):
                metrics = {"reward_mean": step % 7 / 7, "drift_tv_token": 0.01, "ess": 0.9, "predicted_gain": 0.1}
                journal.write("step", step, metrics=metrics, lags=[step % 2], rewards={str(step): [0.5, 2]})
                if step % 2 == 0:
                    journal.write("published", step, version=step, why="period", how="patch", bytes=step)
    write_report([run.path for run in runs], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    out = tmp_path / "report.html"
    out.write_text("the one before")
    with pytest.raises(RuntimeError, match="holds no run"):
        write_report([tmp_path / "one", tmp_path / "nothing"], out)
    assert out.read_text() == "the one before" and not list(tmp_path.glob("*.part"))
