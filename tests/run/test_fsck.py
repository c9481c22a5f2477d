"""`offbeat fsck` finds damage in every part of a run and repairs what another part still holds."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.fsck.check import check_run
from offbeat.run.fsck.findings import PartFinding, Remedy
from tests.fixtures.damage import checkpoints, cut, empty, flip, manifests, replace_by_file

ARCHIVE = Path(__file__).parent.parent / "upgrade" / "0.1.0.tar.xz"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that the last release trained to its end; its paths are relative."""
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


REPAIRED: dict[str, Callable[[Path], object]] = {
    "config.json": lambda run: empty(run / "config.json"),
    "environment.json": lambda run: (run / "environment.json").unlink(),
    "events.jsonl": lambda run: flip(run / "events.jsonl", 0.0),
    "checkpoints/step-": lambda run: flip(checkpoints(run)[-1] / "rank-0000.safetensors"),
    "groups.lance": _tear_next_manifest,
    "weights, version": lambda run: cut(manifests(run)[-1]),
    "index": lambda run: ((run / "index").mkdir(), (run / "index" / "000000000001.index").write_bytes(b"nothing")),
}


@pytest.mark.parametrize("part", REPAIRED)
def test_fsck_names_a_damage_and_repairs_it(run: Path, part: str) -> None:
    REPAIRED[part](run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".lance" not in str(path)}
    code, output = fsck(run)
    assert code == 1
    [line] = [line for line in output.splitlines() if line.startswith("damaged") and part in line.split(": ")[0]]
    assert "--repair` repairs it" in line
    assert all(path.read_bytes() == content for path, content in before.items()), "looking changes nothing"
    code, output = fsck(run, "--repair")
    assert code == 0, output
    assert "repaired: " in output
    assert all(one.remedy is Remedy.RESUME for one in damages(run))


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
    code, output = fsck(run, "--repair")
    assert code == 1
    assert any(line.startswith(f"damaged  {part}") and "estore" in line for line in output.splitlines()), output


def test_a_lost_weight_log_is_left_to_the_next_resume(run: Path) -> None:
    shutil.rmtree(run / "weights")
    [found] = damages(run)
    assert found.part == "weights" and found.remedy is Remedy.RESUME
    assert fsck(run)[0] == 1 and fsck(run, "--repair")[0] == 0


def test_a_file_in_the_place_of_the_weight_log_is_moved_away(run: Path) -> None:
    replace_by_file(run / "weights")
    assert fsck(run, "--repair")[0] == 0
    assert not (run / "weights").exists() and any(run.glob("damaged-*-weights"))


def test_groups_that_differ_from_their_digests_are_counted(run: Path) -> None:
    """A step that the record has and the ledger lacks is found too."""
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    changed = [line.replace('"groups": 4', '"groups": 3') if '"kind": "step"' in line else line for line in lines]
    assert changed != lines
    (run / "events.jsonl").write_text("".join(changed))
    [found] = damages(run)
    assert found.part == "the ledger" and "record and the ledger differ" in found.says


def test_a_run_in_use_is_not_repaired(run: Path) -> None:
    with RunLock(RunDirectory(run)):
        code, output = fsck(run, "--repair")
    assert code == 2 and "in use" in output


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    code, output = fsck(tmp_path)
    assert code == 2 and "holds no run" in output
