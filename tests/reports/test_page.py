"""The HTML report: what it says about runs in every state, and that nothing in it is active."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.events import EventKind
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.reports.page import write_report
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import FileJournal
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score
from tests.reports.hostile import make_hostile_run
from tests.reports.made_run import group, make_run

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements, attributes and text; fails if elements are not closed in order."""

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
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += " ".join(data.split("\n"))


def page(*runs: RunDirectory, out: Path) -> Page:
    write_report([run.path for run in runs], out)
    return Page(out.read_text(encoding="utf-8"))


def test_a_finished_run_has_a_conclusion_and_every_section(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one"), out=tmp_path / "report.html")
    sentence = "pass@1 rose from 0.25 to 1.00 in 8 steps with 4 publishes; generation-bound; the ledger balances."
    assert sentence in found.text
    for part in ("Learning", "Lag and drift", "By lag", "Contrast", "Ledger", "Time", "Bytes published", "Health",
                 "Sample groups", "Configuration", "Improvement at publishes"):  # fmt: skip
        assert part in found.text, part
    assert "16 generated = 12 trained + 0 waiting + 4 dropped (4 zero-variance) + 0 in flight" in found.text
    assert "17+25=" in found.text and "advantage +0.75" in found.text and "trained at step 1" in found.text
    assert "Too few publishes to judge the predictions: 3" in found.text and "1.4 kB in total" in found.text
    assert "tiny on arithmetic with rec-oneside-nois" in found.text


def test_a_page_has_one_script_and_makes_no_request(tmp_path: Path) -> None:
    found = page(make_hostile_run(tmp_path / "one"), make_run(tmp_path / "two"), out=tmp_path / "report.html")
    assert not found.elements & {"img", "link", "iframe", "object", "embed", "form", "a", "base"}
    names = {name for name, _ in found.attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href", "srcset", "action"}
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", written, re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    [script] = re.findall(r"<script>(.*?)</script>", written, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in html.unescape(written)


def test_hostile_text_is_shown_and_inactive(tmp_path: Path) -> None:
    found = page(make_hostile_run(tmp_path / "one"), out=tmp_path / "report.html")
    written = (tmp_path / "report.html").read_bytes().decode("utf-8")
    assert all(c.isprintable() or c == "\n" for c in written)
    assert "<script>document.title='owned'</script>" in found.text and "{{ 7 * 7 }}" in found.text
    assert "<link rel=stylesheet href=http://evil.example/x.css>" in found.text
    assert "\\x1b" in found.text and "\\u202e" in found.text and "\\x9b" in found.text
    assert "999,300 more characters" in found.text and len(written) < 300_000
    assert "unscorable: crash" in found.text


@pytest.mark.parametrize("state", ["still running", "paused", "stopped", "crashed"])
def test_the_report_of_an_unfinished_run_says_so(tmp_path: Path, state: str) -> None:
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


def test_without_evaluations_the_conclusion_uses_the_training_reward(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one", evaluations=False), out=tmp_path / "report.html")
    assert "Training reward went from 0.12 to 1.00 (no evaluations)" in found.text
    assert "To get them, set evaluation.every" in found.text


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.create(make_run(tmp_path / "other").config())
    found = page(directory, out=tmp_path / "report.html")
    assert "No step is complete yet (state: crashed)" in found.text and "no experience log yet" in found.text
    with FileJournal(directory.events) as journal:
        journal.write(EventKind.ESTIMATED, 0, memory="little")
    assert "No step is complete yet" in page(directory, out=tmp_path / "report.html").text


def test_the_report_of_a_run_counts_only_its_own_groups(tmp_path: Path) -> None:
    shared = {"experience": str(tmp_path / "log")}
    runs = [make_run(tmp_path / name, steps=steps, run=shared) for name, steps in (("one", 8), ("two", 4))]
    first, second = (page(run, out=tmp_path / "report.html") for run in runs)
    assert "16 generated = 12 trained" in first.text and "its log has 8 more" in first.text
    assert "8 generated = 6 trained" in second.text and "its log has 16 more" in second.text


def test_a_run_does_not_count_what_others_did_with_its_groups(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    with ExperienceLog.open(one.experience) as log:
        log.record([LedgerEvent("g-17", LedgerEventKind.TRAINED, step=3, by="trainer 0123abcd")])
        log.append([group(0, 0, 2, mark=" 0123abcd")])
    assert "16 generated = 12 trained" in page(one, out=tmp_path / "report.html").text


def test_replayed_groups_are_visible(tmp_path: Path) -> None:
    def also(journal: FileJournal) -> None:
        journal.write(EventKind.STEP, 9, metrics={"reward_mean": 1.0}, lags=[1, 6], groups=2, replayed=1)

    one = make_run(tmp_path / "one", also=also)
    with ExperienceLog.open(one.experience) as log:
        log.record([LedgerEvent("g-4", LedgerEventKind.TRAINED, step=9)])
    found = page(one, out=tmp_path / "report.html").text
    assert "Replayed groups" in found and "trained on before: 1 of 18 in total" in found
    assert "of this run; 12 trained, 1 replays" in found and "trained at steps 2, 9" in found
    assert "Groups were trained on 13 times" in found


def test_unknown_lag_and_drift_are_never_zero(tmp_path: Path) -> None:
    imported = RunDirectory(tmp_path / "run")
    imported.create(parse({"steps": 3, "prompts_per_step": 1, "model": {"path": "tiny"}}))
    with FileJournal(imported.events) as journal, ExperienceLog.open(imported.experience) as log:
        for step in range(1, 4):
            answers = tuple(
                Completion(f"a-{step}/{i}", [5], UNKNOWN, source="human", score=Score(float(i))) for i in (0, 1)
            )
            log.append([Group(f"a-{step}", Prompt(f"p-{step}", [4], "arithmetic"), answers)])
            log.record([LedgerEvent(f"a-{step}", LedgerEventKind.TRAINED, step=step)])
            journal.write(EventKind.STEP, step, metrics={"reward_mean": 0.5}, by_lag={"none": {}}, lags=[], groups=1)
    found = page(imported, out=tmp_path / "report.html").text
    assert "lagunknown" in found and "lag unknown" in found
    assert "Unknown: no group in the batches comes from a version of this run." in found
    assert "Unknown: the batches have no tokens of the version published last" in found


def test_an_offline_run_knows_no_lag_of_the_versions_of_others(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source")
    offline = make_run(
        tmp_path / "offline",
        run={"mode": "offline", "experience": str(source.experience)},
        sampler={"mode": "offline"},
    )
    found = page(offline, out=tmp_path / "report.html")
    assert "Offline: no workers" in found.text and "its log has 16 more" in found.text
    assert "other runs share the experience log" in found.text
    assert "Unknown: no group in the batches" in found.text and "By lag" not in found.text


def test_the_same_prompt_is_shown_before_and_after(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one", prompts=4), out=tmp_path / "report.html").text
    assert "4 prompts were answered early and late: mean reward 0.375, then" in found
    assert "Largest rise" in found and "Median change" in found
    alone = page(make_run(tmp_path / "two", steps=1), out=tmp_path / "report.html").text
    assert "No prompt was answered both early and late" in alone


def test_prompts_of_one_text_under_many_ids_are_paired_too(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one"), out=tmp_path / "report.html").text
    assert "1 prompt was answered early and late: mean reward" in found


def test_every_curve_has_its_values_for_the_pointer(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one"), out=tmp_path / "report.html")
    plots = [json.loads(value or "") for name, value in found.attributes if name == "data-plot"]
    [reward] = [plot for plot in plots if plot["series"][-1].get("y") == [n / 8 for n in range(1, 9)]]
    assert reward["name"] == "step" and reward["series"][0]["x"] == [*range(1, 9)]
    [rate] = [plot for plot in plots if plot["series"][0]["name"] == "pass@1"]
    assert rate["series"][0]["low"] == pytest.approx([0.15, 0.4, 0.65, 0.9])


def test_an_on_policy_run_says_why_nothing_is_predicted(tmp_path: Path) -> None:
    found = page(make_run(tmp_path / "one", every=1), out=tmp_path / "report.html")
    assert "there is nothing to predict" in found.text


def test_a_ledger_that_does_not_balance_is_reported(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one")
    with ExperienceLog.open(directory.experience) as log:
        log.record([LedgerEvent("never appended", LedgerEventKind.TRAINED, step=3)])
    found = page(directory, out=tmp_path / "report.html")
    assert "the ledger does not balance." in found.text and "never appended" in found.text


def test_runs_are_compared_and_seeds_pooled(tmp_path: Path) -> None:
    seeds = [make_run(tmp_path / f"lag1-seed{s}", seed=s) for s in range(3)]
    found = page(*seeds, make_run(tmp_path / "lag3", every=4), out=tmp_path / "report.html")
    assert "4 runs of 2 configurations; last pass@1: lag1 1.000 ± 0.000, lag3 1.000." in found.text
    assert "lag3 − lag1 = +0.000 in pass@1 (1 and 3 seeds; of the last evaluation)" in found.text
    assert "3 (0, 1, 2)" in found.text and "sync.every" in found.text
    assert found.text.count("Sample groups") == 4


def test_the_report_of_a_long_run_is_small(tmp_path: Path) -> None:
    runs = [RunDirectory(tmp_path / name) for name in ("long-0", "long-1")]
    for seed, directory in enumerate(runs):
        directory.create(parse({"steps": 6_000, "seed": seed, "sync": {"every": 2}}))
        with FileJournal(directory.events) as journal:
            for step in range(1, 6_001):
                metrics = {"reward_mean": step % 7 / 7, "drift_tv_token": 0.01, "ess": 0.9, "predicted_gain": 0.1}
                journal.write(EventKind.STEP, step, metrics=metrics, lags=[step % 2], rewards={str(step): [0.5, 2]})
                if step % 2 == 0:
                    journal.write(EventKind.PUBLISHED, step, version=step, why="period", how="patch", bytes=step)
    write_report([run.path for run in runs], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000


def test_a_failed_report_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    out = tmp_path / "report.html"
    out.write_text("the one before")
    with pytest.raises(RuntimeError, match="holds no run"):
        write_report([tmp_path / "one", tmp_path / "nothing"], out)
    assert out.read_text() == "the one before" and not list(tmp_path.glob(".report*"))
