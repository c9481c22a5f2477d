"""The standing suite runs every part, keeps what a failed one printed, and says which were not reached."""

import sys
from itertools import islice
from pathlib import Path

import pytest

from lab.torture import all as suite


def test_every_part_is_tried_once_before_one_is_tried_again() -> None:
    names = [name for name, _ in islice(suite.schedule(seed=5), 2 * len(suite.PARTS))]
    assert sorted(names[: len(suite.PARTS)]) == sorted(suite.PARTS) == sorted(names[len(suite.PARTS) :])
    assert [*islice(suite.schedule(seed=5), 9)] == [*islice(suite.schedule(seed=5), 9)]


def test_every_part_is_a_lab_command() -> None:
    modules = [arguments.split()[0] for arguments in suite.PARTS.values()]
    files = [Path(*module.split(".")).with_suffix(".py") for module in modules]
    assert [str(file) for file in files if "__main__" not in file.read_text(encoding="utf-8")] == []


def test_a_failed_part_keeps_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"whole": "print('fine')", "broken": "print('the cause'); raise SystemExit(1)"}
    monkeypatch.setattr(suite, "PARTS", parts)

    def schedule(seed: int) -> list[tuple[str, list[str]]]:
        return [(name, [sys.executable, "-c", code]) for name, code in parts.items()]

    monkeypatch.setattr(suite, "schedule", schedule)
    outcomes = suite.run(minutes=1, seed=1, kept=tmp_path / "kept")
    assert not outcomes["whole"].failures and len(outcomes["broken"].failures) == 1
    assert "the cause" in (tmp_path / "kept" / "0.txt").read_text()
    row = suite.figure(outcomes, 30, seed=1)
    assert row.measured == "1 of 2" and not row.holds


def test_a_part_that_was_not_reached_is_named() -> None:
    row = suite.figure({"whole": suite.Outcome([1.0]), "late": suite.Outcome()}, 30, seed=1)
    assert not row.holds and "not reached: late" in row.note
