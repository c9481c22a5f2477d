"""Figures of the lab are written completely, replaced by id, and kept in order."""

import json
from pathlib import Path

import pytest

from lab import figures


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lab" / "results").mkdir(parents=True)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "command", lambda: "python -m lab.x")
    return tmp_path / "lab" / "results" / "area.json"


def figure(name: str, measured: float, holds: bool = True) -> figures.Figure:
    return figures.Figure(name, "something", "<= 1", measured, "s", holds, 3)


def test_rows_are_replaced_by_id_and_sorted_by_number(results: Path) -> None:
    assert figures.record(figure("area.10", 1.0), figure("area.2", 1.0))
    assert figures.record(figure("area.10", 2.0))
    rows = json.loads(results.read_text())
    assert [(row["id"], row["measured"]) for row in rows] == [("area.2", 1.0), ("area.10", 2.0)]


def test_a_figure_that_falls_short_stays_in_and_fails_the_command(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not figures.record(figure("area.1", 9.0, holds=False))
    assert json.loads(results.read_text())[0]["holds"] is False
    assert "FALLS SHORT" in capsys.readouterr().out


def test_a_short_run_is_shown_and_not_recorded(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not figures.report(True, figure("area.1", 9.0, holds=False))
    assert not results.exists() and "short run, not recorded" in capsys.readouterr().out
    assert figures.report(False, figure("area.1", 1.0))
    assert results.exists()


def test_every_recorded_row_is_complete() -> None:
    keys = {"id", "what", "goal", "measured", "unit", "holds", "n", "command", "commit", "date", "note"}
    for file in (Path(__file__).parent.parent.parent / "lab" / "results").glob("*.json"):
        for row in json.loads(file.read_text()):
            assert set(row) == keys and row["id"].startswith(f"{file.stem}.")
            assert row["holds"] or row["note"], f"{row['id']} falls short without a reason"
