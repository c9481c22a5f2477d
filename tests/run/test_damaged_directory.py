"""Files of a run directory that are damaged are named in one sentence."""

import json
from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.errors import RunError
from offbeat.run.directory import RunDirectory

DAMAGE = [b"", b"{", b"\xff\xfe", b"[1]", b"7", b"[" * 100_000]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create(parse({})).release()
    return made


@pytest.mark.parametrize("content", DAMAGE, ids=range(len(DAMAGE)))
@pytest.mark.parametrize("file", ["config.json", "environment.json"])
def test_a_damaged_file_is_one_sentence(directory: RunDirectory, file: str, content: bytes) -> None:
    (directory.path / file).write_bytes(content)
    with pytest.raises(RunError, match=rf"{file} (cannot be read|is damaged): .*; restore it from a backup") as caught:
        directory.own_run(directory.config())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"sampler": 7}, {"objective": [1]}, {"evaluation": "no"}])
def test_a_section_of_another_type_is_no_traceback(directory: RunDirectory, change: dict[str, object]) -> None:
    file = directory.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((RunError, ValueError)) as caught:
        directory.config()
    assert type(caught.value).__module__ == "offbeat.errors"


def test_an_id_is_made_once_and_kept(directory: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.create(parse({})).release()
    assert directory.name == RunDirectory(directory.path).name != other.name


def test_an_environment_without_an_id_is_damaged(directory: RunDirectory) -> None:
    (directory.path / "environment.json").write_text("{}")
    with pytest.raises(RunError, match="does not name the run"):
        _ = directory.name
