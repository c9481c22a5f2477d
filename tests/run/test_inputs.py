"""A run resumes only if its data, its rewards and offbeat are what they were, or if a person accepts the change."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app
from offbeat.config import Config, parse
from offbeat.errors import RunError, TaskError
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


WITH_MODULES = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from {package}.rules import rule
from offbeat import Reward

examples = [{{"prompt": "one"}}]
rewards = [Reward(rule, files=[Path(__file__).with_name("words.txt")])]
"""


def write_modules(place: Path, package: str) -> Config:
    """Write a task whose reward is in a package of its own, and what it imports is, too."""
    (place / package / "inner").mkdir(parents=True)
    for name, text in {
        "task.py": WITH_MODULES.format(package=package),
        "words.txt": "alpha",
        f"{package}_late.py": "LIMIT = 1\n",
        f"{package}/rules.py": "import json\nfrom .inner import deep\n"
        f"def rule(text, columns):\n    import {package}_late\n    return deep.LIMIT\n",
        f"{package}/inner/deep.py": f"from {package} import parts\nLIMIT = 1\n",
        f"{package}/parts.py": "unused = 1\n",
    }.items():
        (place / name).write_text(text)
    return parse({"task": {"name": str(place / "task.py")}})


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("pack0_late.py", "the source of pack0_late"),
        ("pack1/inner/deep.py", "the source of pack1.inner.deep"),
        ("pack2/parts.py", "the source of pack2.parts"),
        ("words.txt", "the file of rule: words.txt"),
    ],
)
def test_what_a_reward_imports_or_declares_counts(file: str, says: str, tmp_path: Path) -> None:
    package = file.split("/")[0].split("_")[0] if file.startswith("pack") else "pack3"
    config, directory = write_modules(tmp_path / "a", package), RunDirectory(tmp_path / "run")
    a_checkpoint(directory, before := digest_inputs(config))
    (tmp_path / "a" / file).write_text("# a comment\nLIMIT = 1\n" if file.endswith("deep.py") else "other = 2\n")
    if file.endswith("deep.py"):
        with pytest.raises(RunError):
            require_same_inputs(directory, config)
        (tmp_path / "a" / file).write_text(f"# a comment\nfrom {package} import parts\nLIMIT = 1\n")
        require_same_inputs(directory, config)
        (tmp_path / "a" / file).write_text("LIMIT = 2\n")
    with pytest.raises(RunError, match=f"^{says}.* changed since"):
        require_same_inputs(directory, config)
    earlier = {name: one for name, one in before.items() if name not in ("modules", "files")}
    (directory.checkpoints / "step-00000003" / "manifest.json").write_text(json.dumps({"extras": {"inputs": earlier}}))
    require_same_inputs(directory, config)  # a checkpoint of an earlier release does not know them


def test_a_declared_file_that_is_missing_is_named(tmp_path: Path) -> None:
    config = write_modules(tmp_path / "a", "pack4")
    (tmp_path / "a" / "words.txt").unlink()
    with pytest.raises(TaskError, match=r"declares the file .*words.txt, which cannot be read: No such file"):
        digest_inputs(config)


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
