"""A measured page says when its rows are older than what they measure."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.site import age, peers


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with a commit of ten lines of code, and no results yet."""
    monkeypatch.setattr(age, "ROOT", tmp_path)
    forget()
    (tmp_path / "src" / "offbeat").mkdir(parents=True)
    (tmp_path / "lab" / "results").mkdir(parents=True)
    (tmp_path / "src" / "offbeat" / "code.py").write_text("x = 1\n" * 10)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    yield tmp_path
    forget()  # other tests ask about this repository


def forget() -> None:
    for kept in (age._lines, age._known, age._history, age._added):
        kept.cache_clear()


def git(place: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(["git", *identity, *arguments], cwd=place, capture_output=True, text=True, check=True).stdout


def commit(place: Path) -> str:
    git(place, "add", "-A")
    git(place, "commit", "-qm", "code")
    return git(place, "rev-parse", "--short=12", "HEAD").strip()


def measured(place: Path, *commits: str) -> None:
    rows = [{"commit": one, "date": "2026-11-15"} for one in commits]
    (place / "lab" / "results" / "house.json").write_text(json.dumps(rows))


def test_rows_are_old_once_more_than_a_quarter_of_the_code_has_changed(repository: Path) -> None:
    first, code = age._git("rev-parse", "--short=12", "HEAD"), repository / "src" / "offbeat" / "code.py"
    assert first
    measured(repository, first.strip())
    said = []
    for changed in (0, 2, 3):
        code.write_text("x = 1\n" * (10 - changed) + "y = 2\n" * changed)
        age._added.cache_clear()
        said.append(age.age("house") or "")
    assert said[:2] == ["", ""] and said[2].startswith("**All rows are older")
    measured(repository, first.strip(), f"{commit(repository)}+changes")
    age._history.cache_clear()
    age._known.cache_clear()
    assert str(age.age("house")).startswith("**Some rows are older"), "the second row was measured now"


def test_without_git_a_page_stays_as_it_is(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(repository, "0" * 12)
    assert age.age("house") == "", "a commit that nobody knows, of a day without commits"
    monkeypatch.setenv("PATH", "")
    assert age.age("house") is None


def test_steps_of_all_arms_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    (tmp_path / "lab" / "results").mkdir(parents=True)
    assert "not been run" in peers.steps_table()
    rows = [
        {"id": f"door.2.{part}-48-32", "what": f"seconds of {part}: ours; TRL; SmolLM2", "measured": "2.00 / 3.00"}
        for part in peers.PARTS
    ]
    (tmp_path / "lab" / "results" / "door.json").write_text(json.dumps(rows))
    lines = peers.steps_table().splitlines()
    assert "48 + 32 tokens, TRL: step [3.00](../measured/door.md#door.2.step-48-32) s" in " ".join(lines)
