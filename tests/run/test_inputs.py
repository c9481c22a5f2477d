"""A run resumes only if its data, its rewards and offbeat are what they were, or if a person accepts the change."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app
from offbeat.config import Config, parse
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.run import directory
from offbeat.run.directory import RunDirectory, digest_inputs, require_same_inputs
from offbeat.run.journal import read
from tests.fixtures.tiny_model import save_model

TASK = """
import json
from pathlib import Path

SCALE = 1.0


def examples():
    return [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]


def reward(text, columns):
    return SCALE * any(c.isdigit() for c in text)
"""
ROWS = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5))


def write_task(place: Path, source: str = TASK, rows: str = ROWS) -> Config:
    """Write the task under a new name, because a Python process loads a file once."""
    place.mkdir(exist_ok=True)
    (place / "digits.py").write_text(source)
    (place / "rows.jsonl").write_text(rows)
    return parse({"task": {"name": str(place / "digits.py")}})


def test_only_a_change_that_matters_changes_a_digest(tmp_path: Path) -> None:
    before = digest_inputs(write_task(tmp_path / "a"))
    assert digest_inputs(write_task(tmp_path / "b")) == before, "the place does not matter"
    assert digest_inputs(write_task(tmp_path / "c", TASK + "# a comment\n")) == before
    data = digest_inputs(write_task(tmp_path / "d", rows=ROWS.replace('"3"', '"4"')))
    assert data["data"] != before["data"] and data["rewards"] == before["rewards"]
    rewards = digest_inputs(write_task(tmp_path / "e", TASK.replace("SCALE = 1.0", "SCALE = 0.5")))
    assert rewards["rewards"] != before["rewards"] and rewards["data"] == before["data"], "a helper counts too"


def a_checkpoint(directory: RunDirectory, recorded: object) -> None:
    place = directory.checkpoints / "step-00000003"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(json.dumps({"extras": {"inputs": recorded}}))


def test_resume_names_what_changed(tmp_path: Path) -> None:
    config, directory = write_task(tmp_path / "a"), RunDirectory(tmp_path / "run")
    now = digest_inputs(config)
    require_same_inputs(directory, config)  # without a checkpoint there is nothing to compare
    a_checkpoint(directory, {**now, "data": "other", "offbeat": "0.0.9"})
    with pytest.raises(RunError) as caught:
        require_same_inputs(directory, config)
    assert "the data of the task and the version of offbeat (0.0.9, now" in str(caught.value)
    assert "--accept-changes" in str(caught.value)


@pytest.mark.parametrize("recorded", [None, "same"])
def test_an_unchanged_run_and_one_of_an_earlier_release_resume(tmp_path: Path, recorded: str | None) -> None:
    config, directory = write_task(tmp_path / "a"), RunDirectory(tmp_path / "run")
    a_checkpoint(directory, digest_inputs(config) if recorded else None)
    require_same_inputs(directory, config)


def test_a_long_data_set_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MOST_EXAMPLES", 2)
    first, second = write_task(tmp_path / "a"), write_task(tmp_path / "b", rows=ROWS.replace('"5"', '"0"'))
    assert digest_inputs(first)["data"] == digest_inputs(second)["data"], "row 4 of 5 is not among 0, 3"
    assert digest_inputs(write_task(tmp_path / "c", rows=ROWS + ROWS))["data"] != digest_inputs(first)["data"]


@pytest.mark.engine
def test_a_changed_reward_stops_resume_until_it_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model")
    task = write_task(tmp_path / "task").task.name
    (tmp_path / "run.toml").write_text(
        f'steps = 1\nprompts_per_step = 2\ngroup_size = 4\n[model]\npath = "{tmp_path}/model"\n[engine]\nkind = "hf"\n'
        f'[sampling]\nmax_tokens = 5\n[objective]\nzero_variance_mask = false\n[task]\nname = "{task}"\nscorers = 1\n'
        "[evaluation]\nhold_out = 0.0\n"
    )
    place, run = str(tmp_path / "run"), CliRunner().invoke
    assert run(app, ["train", str(tmp_path / "run.toml"), "--out", place]).exit_code == 0
    (tmp_path / "task" / "digits.py").write_text(TASK.replace("SCALE = 1.0", "SCALE = 0.5"))
    refused = run(app, ["resume", place, "--steps", "2"])
    assert refused.exit_code == 2 and "the source of the reward functions changed" in refused.output
    with pytest.raises(RunError, match="accept_changes=True"):
        offbeat.resume(place, steps=2, progress=False)
    assert run(app, ["resume", place, "--steps", "2", "--accept-changes"]).exit_code == 0
    assert run(app, ["resume", place, "--steps", "3"]).exit_code == 0, "the newest checkpoint has the new digests"
    changed = [event for event in read(RunDirectory(Path(place)).events) if event["kind"] == EventKind.CHANGED]
    assert [event["what"] for event in changed] == [["the source of the reward functions"]]
