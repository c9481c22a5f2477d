"""A resume never destroys the last copy: it refuses if checkpoints are lost, and deletes only behind the next one."""

import hashlib
import json
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app
from offbeat.errors import CheckpointDamaged, RunError
from offbeat.events import EventKind
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck import require_checkpoint
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.storage.store import LocalStore
from offbeat.weights.inspection import find_problem, read_manifests
from offbeat.weights.manifest import SUPERSEDED
from tests.fixtures.damage import checkpoints, empty, flip, manifests
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import Run, write_config
from tests.fixtures.tiny_model import save_model
from tests.run.test_local import config

ARCHIVE = Path(__file__).parent.parent / "upgrade" / "a4ce5e6.tar.xz"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(place, filter="data")
    return place


@pytest.fixture
def run(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run of six steps with checkpoints of steps 3 and 6."""
    monkeypatch.chdir(shutil.copytree(archive, tmp_path / "place"))  # its paths are relative
    return Path("runs/ended")


def digest(place: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        hasher.update(f"{path.relative_to(place)} {path.stat().st_mode}\n".encode())
        hasher.update(path.read_bytes() if path.is_file() else b"")
    return hasher.hexdigest()


def lose(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def damage(run: Path, change: Callable[[Path], None], name: str) -> None:
    for checkpoint in checkpoints(run):
        change(checkpoint / name)


def name_damaged(run: Path) -> None:
    """Leave what an earlier release left: it renamed each damaged checkpoint, and the next resume found none."""
    for checkpoint in checkpoints(run):
        checkpoint.rename(checkpoint.with_name(f"damaged-1-{checkpoint.name}"))
    (run / "events.jsonl").unlink()
    shutil.rmtree(run / "experience")
    shutil.rmtree(run / "weights")


def lose_with(run: Path, *parts: str) -> None:
    lose(run)
    for part in parts:
        (run / part).unlink() if (run / part).is_file() else shutil.rmtree(run / part)


def lose_all_but_the_mark(run: Path) -> None:
    lose_with(run, "events.jsonl", "experience", "weights")
    (run / "saved.json").write_text('{"step": 6}')


LOSSES: dict[str, Callable[[Path], object]] = {
    "the directory is gone": lose,
    "the directory is empty": lambda run: (lose(run), (run / "checkpoints").mkdir()),
    "a bit of each policy is flipped": lambda run: damage(run, flip, "rank-0000.safetensors"),
    "each policy is gone": lambda run: damage(run, Path.unlink, "rank-0000.safetensors"),
    "each manifest is flipped": lambda run: damage(run, flip, "manifest.json"),
    "each manifest is empty": lambda run: damage(run, empty, "manifest.json"),
    "each manifest is gone": lambda run: damage(run, Path.unlink, "manifest.json"),
    "only damaged ones are left": name_damaged,
    "gone, and the record too": lambda run: lose_with(run, "events.jsonl"),
    "gone, and the record and the weights too": lambda run: lose_with(run, "events.jsonl", "weights"),
    "gone, and the record and the ledger too": lambda run: lose_with(run, "events.jsonl", "experience"),
    "gone, and only saved.json is left": lose_all_but_the_mark,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_resume_without_its_checkpoints_refuses_and_changes_nothing(run: Path, loss: str) -> None:
    LOSSES[loss](run)
    before = digest(run)
    result = CliRunner().invoke(app, ["resume", str(run)])
    assert result.exit_code == 2, result.output
    for words in (
        "has lost its policy",
        "`offbeat fsck` says",
        "Nothing was changed",
        "Restore runs/ended/checkpoints",
    ):
        assert words in result.output
    with pytest.raises(CheckpointDamaged, match="none can be read"):
        offbeat.resume(run, progress=False)
    assert digest(run) == before


def test_the_refusal_repeats_what_fsck_says_of_the_checkpoints(run: Path) -> None:
    damage(run, flip, "rank-0000.safetensors")
    found = CliRunner().invoke(app, ["fsck", str(run)]).output
    [line, other] = [line for line in found.splitlines() if line.startswith("damaged  checkpoints/")]
    with pytest.raises(CheckpointDamaged) as caught:
        offbeat.resume(run, progress=False)
    assert line in str(caught.value) and other in str(caught.value)


def test_a_run_on_ray_refuses_before_a_cluster_starts(run: Path) -> None:
    lose(run)
    settings = json.loads((run / "config.json").read_text())
    settings["run"]["place"] = "ray"
    (run / "config.json").write_text(json.dumps(settings))
    before = digest(run)
    assert CliRunner().invoke(app, ["resume", str(run)]).exit_code == 2
    assert digest(run) == before


def test_one_whole_checkpoint_is_enough(run: Path) -> None:
    flip(checkpoints(run)[-1] / "rank-0000.safetensors")
    require_checkpoint(RunDirectory(run))


def test_checkpoints_that_a_person_set_aside_are_not_lost(run: Path) -> None:
    for checkpoint in checkpoints(run):
        checkpoint.rename(checkpoint.with_name(f"superseded-1-{checkpoint.name}"))
    require_checkpoint(RunDirectory(run))


def test_a_run_that_died_in_its_first_save_starts_again_at_step_0(run: Path) -> None:
    """A save that was killed leaves a directory without a manifest. Nothing says that one was complete."""
    first, second = checkpoints(run)
    shutil.rmtree(second)
    (first / "manifest.json").unlink()
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    [end] = [
        at for at, line in enumerate(lines) if json.loads(line)["kind"] == "saved" and json.loads(line)["step"] == 3
    ]
    (run / "events.jsonl").write_text("".join(lines[: end + 1]))
    shutil.rmtree(run / "experience")
    for manifest in manifests(run)[1:]:
        manifest.unlink()
    require_checkpoint(RunDirectory(run))
    shutil.rmtree(first)
    with pytest.raises(CheckpointDamaged, match="there are none"):
        require_checkpoint(RunDirectory(run))


def test_a_directory_that_lost_its_record_takes_no_new_run(run: Path) -> None:
    (run / "events.jsonl").unlink()
    with pytest.raises(RunError, match="already holds a run"):
        RunDirectory(run).require_new()


# Real runs, killed.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def killed(place: Path, model: Path, *, after: int, save_every: int) -> Run:
    """Start `offbeat train` and kill it after a step, as soon as a publish and the save before are on disk."""
    write_config(place, model, on_ray=False, workers=1)
    text = (place / "run.toml").read_text().replace("save_every = 20", f"save_every = {save_every}")
    (place / "run.toml").write_text(text)
    real = Run(place / "run")
    real.start("train", str(place / "run.toml"), "--out", str(real.directory))

    def far(events: list[dict]) -> bool:
        steps = [event["step"] for event in events if event["kind"] == EventKind.STEP]
        saved = save_every > after or (real.directory / "saved.json").exists()
        return bool(steps) and steps[-1] >= after and saved and len(states(real.directory)) >= 2

    real.wait_for(f"step {after}", far, 120)
    assert real.driver is not None
    real.driver.send_signal(signal.SIGKILL)
    real.driver.wait()
    return real


@pytest.mark.engine
def test_a_killed_run_whose_checkpoints_are_removed_is_not_started_again(model: Path, tmp_path: Path) -> None:
    real = killed(tmp_path, model, after=4, save_every=2)
    shutil.rmtree(real.directory / "checkpoints")
    before = digest(real.directory)
    done = subprocess.run([OFFBEAT, "resume", str(real.directory)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "has lost its policy" in done.stderr
    assert digest(real.directory) == before


@pytest.mark.engine
def test_a_run_that_is_killed_before_its_first_save_resumes_at_step_0(model: Path, tmp_path: Path) -> None:
    real = killed(tmp_path, model, after=2, save_every=1000)
    directory = RunDirectory(real.directory)
    train(directory.config().model_copy(update={"steps": 1}), directory)
    events = list(read(directory.events))
    [resumed] = [event for event in events if event["kind"] == EventKind.RESUMED]
    assert resumed["step"] == 0 and events[-1]["kind"] == EventKind.ENDED
    assert not list((directory.weights / SUPERSEDED).glob("[0-9]*"))


def states(run: Path) -> dict[str, str]:
    """Return the states that the weight log holds or has set aside, by the names of their manifests."""
    found = {}
    for folder in ("versions", SUPERSEDED):
        for path in sorted((run / "weights" / folder).glob("[0-9]*.json")):
            content = json.loads(path.read_bytes().partition(b"\n")[2])
            if all((run / "weights" / file["name"]).exists() for file in (content["patch"], content["anchor"]) if file):
                found[f"{folder}/{path.name}"] = content["state"]
    return found


@pytest.mark.engine
def test_versions_after_the_checkpoint_stay_until_the_next_checkpoint_is_on_disk(model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=8, trainer={"save_every": 3})
    directory = RunDirectory(tmp_path / "run")
    directory.create(asked).release()

    def die_at_5(event: dict) -> None:
        if event["kind"] == EventKind.PUBLISHED and event["version"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(asked, directory, watching=die_at_5)
    rewound = {state for name, state in states(directory.path).items() if name > "versions/0000000003.json"}
    kept: list[bool] = []

    def look(event: dict) -> None:
        if event["kind"] == EventKind.STEP:
            kept.append(rewound <= set(states(directory.path).values()))

    assert len(rewound) == 2
    train(asked.model_copy(update={"steps": 9}), directory, watching=look)
    assert kept[:3] == [True] * 3  # steps 4 to 6, before the save at step 6
    assert not list((directory.weights / SUPERSEDED).glob("[0-9]*"))
    found, damaged = read_manifests(LocalStore(directory.weights))
    assert not damaged and all(find_problem(LocalStore(directory.weights), found, one) is None for one in found)
