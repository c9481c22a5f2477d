"""A checkpoint restores every bit, names what is missing, and never replaces the last good one."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from offbeat.cli.report import export as command
from offbeat.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from offbeat.storage.store import LocalStore
from offbeat.trainer.checkpoint import Checkpoint, Checkpoints, saved_folders
from offbeat.trainer.checkpoint_files import (
    MANIFEST,
    CheckpointManifest,
    CheckpointPart,
    Slice,
    read_rows,
    trainer_tensors,
    write_part,
)
from offbeat.trainer.export import export, load_policy
from offbeat.trainer.fsdp import Ranks, serving_state
from offbeat.trainer.trainer import Trainer
from offbeat.types import Json
from tests.fixtures import tiny_model
from tests.fixtures.small_trainer import digest_of, small_batch, small_model, small_trainer

CONFIG: Json = {"seed": 7, "sync": {"every": 4}}


def trained(steps: int, **kind: object) -> Trainer:
    trainer = small_trainer(**kind)  # type: ignore[arg-type]
    for _ in range(steps):
        trainer.train(small_batch(trainer.step))
    return trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        trainer = trained(1)
        checkpoints.save(trainer, {"sampler": {"k": 0}})
        trainer.train(small_batch(1))
        checkpoints.save(trainer, {"sampler": {"k": 1}})
    return tmp_path


@pytest.mark.parametrize("kind", [{}, {"dtype": torch.bfloat16}, {"tied": False}, {"reference": True}])
def test_a_restored_trainer_continues_with_the_same_bits(tmp_path: Path, kind: dict[str, object]) -> None:
    trainer = trained(2, **kind)
    torch.manual_seed(5)
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        checkpoints.save(trainer, {})
        saved = digest_of(trainer)
        trainer.train(small_batch(2))
        torch.manual_seed(6)
        again = small_trainer(**kind)  # type: ignore[arg-type]
        newest = checkpoints.newest()
    assert newest is not None and newest.step == 2
    newest.restore(again)
    assert digest_of(again) == saved, "the generators included"
    torch.manual_seed(6)
    again.train(small_batch(2))
    assert digest_of(again) == digest_of(trainer)


def test_a_save_holds_the_trainer_at_that_moment_even_if_it_trains_on(tmp_path: Path) -> None:
    trainer = trained(1)
    expected = digest_of(trainer)
    extras: dict[str, Json] = {"sampler": {"k": 0}}
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        checkpoints.save(trainer, extras)
        extras["sampler"] = {"k": 99}
        for _ in range(3):
            trainer.train(small_batch(trainer.step))
        newest = checkpoints.newest()
        assert newest is not None and newest.extra("sampler") == {"k": 0}
        newest.restore(trainer)
    assert digest_of(trainer) == expected


def test_the_newest_two_stay_and_older_ones_are_removed(tmp_path: Path) -> None:
    trainer = small_trainer()
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        for step in (0, 3, 6, 9):
            trainer.step = step
            checkpoints.save(trainer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-0000000006", "step-0000000009"]


def test_fewer_than_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep at least 2"):
        Checkpoints(tmp_path, config=CONFIG, keep=1)


def test_an_unfinished_checkpoint_is_out_of_the_way_and_the_previous_one_is_used(folder: Path) -> None:
    (folder / "step-0000000002" / MANIFEST).unlink()
    with Checkpoints(folder, config=CONFIG) as checkpoints:
        newest = checkpoints.newest()
    assert newest is not None and newest.step == 1 and not (folder / "step-0000000002").exists()


@pytest.mark.engine
def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    code = f"from offbeat.trainer.checkpoint import Checkpoints; Checkpoints({str(tmp_path)!r}, config=None)"
    with Checkpoints(tmp_path, config=CONFIG):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode == 1 and "another run is writing" in other.stderr


def test_a_run_without_checkpoints_has_no_newest_one(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "none", config=CONFIG) as checkpoints:
        assert checkpoints.newest() is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the weights": (lambda at: flip(at / "rank-0000.safetensors"), "has sha256"),
    "the end of the weights": (lambda at: os.truncate(at / "rank-0000.safetensors", 999), "has 999 bytes"),
    "the weights": (lambda at: (at / "rank-0000.safetensors").unlink(), "cannot be read"),
    "a bit of the manifest": (lambda at: flip(at / MANIFEST), "manifest.json is damaged"),
    "all of the manifest": (lambda at: (at / MANIFEST).write_bytes(b""), "manifest.json is damaged"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_used(
    folder: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, words = DAMAGE[what]
    damage(folder / "step-0000000002")
    with pytest.raises(CheckpointDamaged, match=words):
        Checkpoint.open(folder / "step-0000000002")
    with Checkpoints(folder, config=CONFIG) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 1
        assert words in caplog.text
        trainer = small_trainer()
        newest.restore(trainer)
        trainer.train(small_batch(1))
        checkpoints.save(trainer, {})
        again = checkpoints.newest()
        assert again is not None and again.step == 2
    assert len(list(folder.glob("damaged-*"))) == 1


def test_if_all_checkpoints_are_damaged_the_error_lists_each_problem(folder: Path) -> None:
    for step in (1, 2):
        flip(folder / f"step-{step:010}" / "rank-0000.safetensors")
    with (
        Checkpoints(folder, config=CONFIG) as checkpoints,
        pytest.raises(CheckpointDamaged, match=r"no checkpoint in .* is intact.*step-0000000002.*step-0000000001"),
    ):
        checkpoints.newest()
    assert saved_folders(folder) == [folder / "step-0000000001", folder / "step-0000000002"], "neither was renamed"


def test_an_unfinished_checkpoint_is_set_aside_and_goes_behind_the_next_one(folder: Path) -> None:
    (folder / "step-0000000002" / MANIFEST).unlink()
    saved: list[int] = []
    with Checkpoints(folder, config=CONFIG, record=saved.append) as checkpoints:
        [aside] = folder.glob("unfinished-*-step-0000000002")
        assert (aside / "rank-0000.safetensors").exists() and checkpoints.on_disk is None
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 1
        trainer = small_trainer()
        newest.restore(trainer)
        trainer.train(small_batch(1))
        checkpoints.save(trainer, {})
        checkpoints.wait()
        assert not aside.exists() and checkpoints.on_disk == 2
    assert saved == [2]


def test_another_configuration_is_refused_with_the_settings_that_differ(folder: Path) -> None:
    with (
        Checkpoints(folder, config={"seed": 7, "sync": {"every": 8}}) as checkpoints,
        pytest.raises(CheckpointMismatch, match=r"sync\.every is 8 and was 4"),
    ):
        checkpoints.newest()


def without(folder: Path, piece: str) -> Checkpoint:
    """The checkpoint of step 2 without one kind of tensor, otherwise valid."""
    at = folder / "step-0000000002"
    manifest = Checkpoint.open(at).manifest
    tensors = load_file(at / "rank-0000.safetensors")
    kept = {name: Slice(tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items() if piece not in name}
    shutil.rmtree(at)
    at.mkdir()
    write_part(LocalStore(folder), at.name, 0, kept)
    part = CheckpointPart.from_json(json.loads((at / "rank-0000.json").read_text()))
    (at / MANIFEST).write_bytes(replace(manifest, parts=(part,)).serialize())
    return Checkpoint.open(at)


@pytest.mark.parametrize("piece", ["policy/model.norm.weight", "exp_avg/", "exp_avg_sq/", "step/", "rng/"])
def test_a_missing_tensor_is_named(folder: Path, piece: str) -> None:
    checkpoint = without(folder, piece)
    trainer = small_trainer()
    before = digest_of(trainer)
    with pytest.raises(CheckpointMismatch, match=f"it lacks {piece}"):
        checkpoint.restore(trainer)
    assert digest_of(trainer) == before, "nothing was touched"


def test_a_missing_or_unexpected_reference_policy_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="it lacks reference/"):
        Checkpoint.open(folder / "step-0000000002").restore(small_trainer(reference=True))
    with Checkpoints(tmp_path / "other", config=CONFIG) as checkpoints:
        checkpoints.save(small_trainer(reference=True), {})
        newest = checkpoints.newest()
    assert newest is not None
    with pytest.raises(CheckpointMismatch, match=r"it has reference/.*, which this trainer does not have"):
        newest.restore(small_trainer())


def test_a_slice_that_is_in_no_file_is_named(folder: Path) -> None:
    at = folder / "step-0000000002"
    manifest = Checkpoint.open(at).manifest
    [part] = manifest.parts
    norm = "policy/model.norm.weight"
    half = replace(part.entries[norm], end=16)
    torn = replace(manifest, parts=(replace(part, entries={**part.entries, norm: half}),))
    (at / MANIFEST).write_bytes(torn.serialize())
    with pytest.raises(CheckpointDamaged, match=r"rows 16 to 32 of policy/model.norm.weight are in no file"):
        Checkpoint.open(at)


def test_a_manifest_of_another_format_is_refused(folder: Path) -> None:
    at = folder / "step-0000000002" / MANIFEST
    at.write_bytes(at.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(CheckpointError, match="another version of offbeat"):
        Checkpoint.open(at.parent)


@given(rows=st.integers(1, 9), columns=st.integers(1, 3), writers=st.integers(1, 5), readers=st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_other_number_wrote(
    rows: int, columns: int, writers: int, readers: int
) -> None:
    whole = torch.randn(rows, columns)

    def cut(size: int) -> list[tuple[int, int]]:
        each = -(-rows // size)
        return [(min(r * each, rows), min((r + 1) * each, rows)) for r in range(size)]

    with tempfile.TemporaryDirectory() as place:
        folder, parts = Path(place) / "step-0000000000", []
        folder.mkdir()
        for rank, (start, end) in enumerate(cut(writers)):
            slices = {"w": Slice(whole[start:end], start, (rows, columns))} if end > start else {}
            write_part(LocalStore(Path(place)), folder.name, rank, slices)
            parts.append(CheckpointPart.from_json(json.loads((folder / f"rank-{rank:04}.json").read_text())))
        manifest = CheckpointManifest(0, None, None, {}, tuple(parts))
        for start, end in cut(readers):
            assert torch.equal(read_rows(folder, manifest, "w", start, end), whole[start:end])


def test_another_model_is_refused_with_the_shapes(folder: Path) -> None:
    trainer = small_trainer(tied=False)
    with pytest.raises(CheckpointMismatch, match=r"it lacks exp_avg/lm_head\.weight"):
        Checkpoint.open(folder / "step-0000000002").restore(trainer)


def test_an_extra_that_was_not_saved_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="has no 'cadence'; beside the trainer it has sampler"):
        Checkpoint.open(folder / "step-0000000002").extra("cadence")


def test_a_disk_error_is_raised_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        checkpoints.save(small_trainer(), {})
        checkpoints.wait()
        monkeypatch.setattr("offbeat.trainer.checkpoint.write_part", full)
        checkpoints.save(trained(1), {})
        deadline = time.monotonic() + 10
        with pytest.raises(CheckpointError, match="No space left on device"):
            while time.monotonic() < deadline:
                checkpoints.check()
                time.sleep(0.01)
    with Checkpoints(tmp_path, config=CONFIG) as checkpoints:
        newest = checkpoints.newest()
    assert newest is not None and newest.step == 0


def test_waiting_for_a_missing_part_has_a_deadline(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, config=CONFIG, patience=0.1) as checkpoints:
        checkpoints._ranks = Ranks(0, 2)  # rank 1 does not exist
        checkpoints.save(trained(1), {})
        with pytest.raises(CheckpointError, match=r"for rank 1 to write its part.*every rank sees"):
            checkpoints.wait()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = small_trainer()
    trainer.optimizer = type(trainer.optimizer)(small_model(), trainer.optimizer.settings)
    with pytest.raises(CheckpointError, match="make the optimizer from the policy model"):
        trainer_tensors(trainer)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_an_export(tmp_path: Path, tied: bool) -> None:
    trainer = trained(1, tied=tied)
    tiny_model.save_tokenizer(tmp_path / "run" / "tokenizer")
    with Checkpoints(tmp_path / "run" / "checkpoints", config=CONFIG) as checkpoints:
        checkpoints.save(trainer, {})
    export(tmp_path / "run", tmp_path / "out", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    for (name, ours), theirs in zip(trainer.policy_model.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    ids = torch.arange(3, 9)[None]
    assert torch.equal(loaded(ids).logits, trainer.policy_model.model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)("1+1")["input_ids"]


@pytest.mark.parametrize(
    ("compute", "serve"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")],
)
def test_an_export_in_float32_has_the_values_that_were_served(compute: str, serve: str, tmp_path: Path) -> None:
    trainer = trained(1, dtype=getattr(torch, compute))
    config: Json = {"model": {"compute": compute, "serve": serve}}
    with Checkpoints(tmp_path / "checkpoints", config=config) as checkpoints:
        checkpoints.save(trainer, {})
    export(tmp_path, tmp_path / "out", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype="auto")
    found, served = dict(loaded.named_parameters()), dict(serving_state(trainer.policy_model, getattr(torch, serve)))
    assert found.keys() == served.keys() and all(torch.equal(found[name], one.float()) for name, one in served.items())
    policy = load_policy(tmp_path, dtype=torch.float32)
    assert all(torch.equal(found[name], one) for name, one in policy.named_parameters())


def test_the_command_exports_rounds_and_explains(tmp_path: Path, folder: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [str(folder), str(out)])
    assert done.exit_code == 0 and "step 2" in done.output, done.output
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    again = CliRunner().invoke(app, [str(folder), str(out)])
    assert again.exit_code == 1 and "not empty" in again.output
    flip(folder / "step-0000000002" / "rank-0000.safetensors")
    damaged = CliRunner().invoke(app, [str(folder / "step-0000000002"), str(tmp_path / "other")])
    assert damaged.exit_code == 1 and "sha256" in damaged.output
    nothing = CliRunner().invoke(app, [str(out), str(tmp_path / "other")])
    assert nothing.exit_code == 1 and "neither a checkpoint nor a run" in nothing.output


@pytest.mark.engine
@pytest.mark.parametrize("what", ["resume", "checkpoints"])
def test_a_killed_run_resumes_with_the_same_bits(what: str) -> None:
    """Run the short forms of the lab's torture."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "lab.torture.trainer", what, "--short"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
    )
    assert done.returncode == 0, done.stdout + done.stderr
