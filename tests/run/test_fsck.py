"""`offbeat fsck` finds damage in every part of a run, and what it advises repairs it."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck import PartFinding, Remedy, check_run
from tests.fixtures.damage import checkpoints, cut, empty, flip, manifests, replace_by_file

ARCHIVE = Path(__file__).parent.parent / "upgrade" / "a4ce5e6.tar.xz"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that an earlier commit trained to its end; its paths are relative."""
    place = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place / "runs" / "ended"


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ended, tmp_path / "run")


def fsck(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fsck", str(run), *options], catch_exceptions=False)
    return result.exit_code, result.output


def damages(run: Path) -> list[PartFinding]:
    return [one for one in check_run(RunDirectory(run)) if one.remedy is not None]


def test_a_whole_run_is_whole(run: Path) -> None:
    code, output = fsck(run)
    assert code == 0, output
    assert all(line.startswith("whole") for line in output.splitlines())
    for part in ("config.json", "events.jsonl", "checkpoints/step-", "groups.lance", "the ledger", "weights"):
        assert part in output


def _tear_next_manifest(run: Path) -> None:
    newest = min((run / "experience" / "groups.lance" / "_versions").glob("*.manifest"))
    newest.with_name(f"{int(newest.stem) - 1:020}.manifest").write_bytes(newest.read_bytes()[:100])


def _write_config(run: Path) -> None:
    manifest = json.loads((checkpoints(run)[-1] / "manifest.json").read_text())
    (run / "config.json").write_text(json.dumps(manifest["config"]))


def _delete_line(run: Path) -> None:
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[1:]))


ADVICE: dict[str, tuple[Callable[[Path], object], str, Callable[[Path], object]]] = {
    "config.json": (lambda run: empty(run / "config.json"), 'manifest.json holds as "config"', _write_config),
    "environment.json": (
        lambda run: (run / "environment.json").unlink(),
        'write {"run": "a new name"} into it',
        lambda run: (run / "environment.json").write_text('{"run": "again"}'),
    ),
    "events.jsonl": (lambda run: flip(run / "events.jsonl", 0.0), "are no events (1). Delete them", _delete_line),
    "weights": (lambda run: replace_by_file(run / "weights"), "Move it away", lambda run: (run / "weights").unlink()),
}


@pytest.mark.parametrize("part", ADVICE)
def test_who_follows_the_advice_for_a_damage_has_repaired_it(run: Path, part: str) -> None:
    damage, advice, follow = ADVICE[part]
    damage(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".lance" not in str(path)}
    code, output = fsck(run)
    assert code == 1
    [line] = [line for line in output.splitlines() if line.startswith(f"damaged  {part}")]
    assert advice in line and line.endswith("only you can repair it")
    assert all(path.read_bytes() == content for path, content in before.items()), "looking changes nothing"
    follow(run)
    assert all(one.remedy is Remedy.RESUME for one in damages(run))


RESUMED: dict[str, Callable[[Path], object]] = {
    "checkpoints/step-": lambda run: flip(checkpoints(run)[-1] / "rank-0000.safetensors"),
    "experience/groups.lance": lambda run: _tear_next_manifest(run),
    "weights, version": lambda run: cut(manifests(run)[-1]),
    "index": lambda run: ((run / "index").mkdir(), (run / "index" / "000000000001.index").write_bytes(b"nothing")),
}


@pytest.mark.parametrize("part", RESUMED)
def test_what_a_resume_repairs_is_left_to_it(run: Path, part: str) -> None:
    RESUMED[part](run)
    found = [one for one in damages(run) if one.part.startswith(part)]
    assert found and all(one.remedy is Remedy.RESUME for one in found), found


def _tear_next_manifest(run: Path) -> None:
    newest = min((run / "experience" / "groups.lance" / "_versions").glob("*.manifest"))
    newest.with_name(f"{int(newest.stem) - 1:020}.manifest").write_bytes(newest.read_bytes()[:100])


LOST: dict[str, Callable[[Path], object]] = {
    "experience/events.lance": lambda run: shutil.rmtree(run / "experience" / "events.lance"),
    "experience/groups.lance": lambda run: [
        cut(path) for path in (run / "experience" / "groups.lance" / "data").iterdir()
    ],
    "checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
}


@pytest.mark.parametrize("part", LOST)
def test_what_only_a_person_can_restore_is_named_and_left_as_it_is(run: Path, part: str) -> None:
    LOST[part](run)
    code, output = fsck(run)
    assert code == 1
    assert any(line.startswith(f"damaged  {part}") and "estore" in line for line in output.splitlines()), output


def test_a_lost_weight_log_is_left_to_the_next_resume(run: Path) -> None:
    shutil.rmtree(run / "weights")
    [found] = damages(run)
    assert found.part == "weights" and found.remedy is Remedy.RESUME
    assert fsck(run)[0] == 1


def test_groups_that_differ_from_their_digests_are_counted(run: Path) -> None:
    """A step that the record has and the ledger lacks is found too."""
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    changed = [line.replace('"groups": 4', '"groups": 3') if '"kind": "step"' in line else line for line in lines]
    assert changed != lines
    (run / "events.jsonl").write_text("".join(changed))
    [found] = damages(run)
    assert found.part == "the ledger" and "record and the ledger differ" in found.says


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    code, output = fsck(tmp_path)
    assert code == 2 and "holds no run" in output


def test_a_run_that_was_killed_before_its_first_event_is_whole(run: Path) -> None:
    for part in ("checkpoints", "weights", "experience"):
        shutil.rmtree(run / part)
    for file in ("events.jsonl", "saved.json"):
        (run / file).unlink(missing_ok=True)
    assert not [one for one in damages(run) if one.part == "events.jsonl"]


def test_a_lost_newest_checkpoint_is_named(run: Path) -> None:
    saved = int(checkpoints(run)[-1].name.removeprefix("step-"))
    (run / "saved.json").write_text(json.dumps({"step": saved}))
    shutil.rmtree(checkpoints(run)[-1])
    [found] = [one for one in damages(run) if one.part == "checkpoints"]
    assert f"step {saved}, which was saved last, is gone" in found.says and found.remedy is Remedy.RESUME


def test_a_lost_vocabulary_is_named(run: Path) -> None:
    (run / "tokenizer" / "tokenizer.json").unlink()
    assert [one.part for one in damages(run)] == ["tokenizer"]
