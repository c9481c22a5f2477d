"""Breaks of the rule that the last copy is never destroyed.

It uses only the command line and files, so the same tests run against any commit. Commit a4ce5e6 trained the run.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).resolve().parent.parent / "upgrade" / "a4ce5e6.tar.xz"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the directory of the model, the task and the runs; paths in the runs are relative to it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def offbeat(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "offbeat", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=280)


def tree(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def versions(run: Path) -> set[str]:
    """Return the first line of every manifest of the weight log, wherever in the run it is."""
    return {path.read_text().partition("\n")[0] for path in (run / "weights").rglob("*0*.json")}


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def set_aside(run: Path) -> None:
    """Rename all checkpoints, as commit a4ce5e6 does in a first resume that finds each of them damaged."""
    for checkpoint in checkpoints(run):
        flip(checkpoint / "rank-0000.safetensors")
        checkpoint.rename(checkpoint.with_name(f"damaged-1-{checkpoint.name}"))


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": lambda run: shutil.rmtree(run / "checkpoints"),
    "set aside as damaged": set_aside,
    "without manifests": lambda run: [(one / "manifest.json").unlink() for one in checkpoints(run)],
    "flipped": lambda run: [flip(one / "rank-0000.safetensors") for one in checkpoints(run)],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_resume_without_checkpoints_refuses_and_changes_nothing(place: Path, loss: str) -> None:
    run = place / "runs" / "ended"
    LOSSES[loss](run)
    before = tree(run)
    done = offbeat(place, "resume", "runs/ended", "--steps", "7")
    after = tree(run)
    assert done.returncode != 0, f"it trained again from step 0: {done.stdout[-500:]}"
    assert "fsck" in done.stderr and "checkpoints" in done.stderr
    assert after == before, [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


def test_versions_are_not_deleted_before_a_new_checkpoint_is_on_disk(place: Path) -> None:
    """Versions 4 and 6 are newer than the checkpoint of step 3. The resume dies before it saves again."""
    run = place / "runs" / "ended"
    shutil.rmtree(checkpoints(run)[-1])
    before = versions(run)
    code = (
        "import os, sys\n"
        "from offbeat.weights.publisher import WeightLog\n"
        "WeightLog.publish = lambda *given, **named: os._exit(3)\n"
        "sys.argv = ['offbeat', 'resume', 'runs/ended', '--steps', '7']\n"
        "from offbeat.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=280)
    assert done.returncode == 3, done.stderr[-1000:]
    assert versions(run) >= before, "versions are gone, and no new checkpoint is there"
    assert len(list((run / "weights" / "data").iterdir())) >= 4


def test_a_run_that_lost_its_record_is_not_overwritten_by_a_new_one(place: Path) -> None:
    run = place / "runs" / "ended"
    (run / "events.jsonl").unlink()
    before = tree(run)
    done = offbeat(place, "train", "run.toml", "--out", "runs/ended")
    assert done.returncode != 0 and "already holds a run" in done.stderr
    assert tree(run) == before
