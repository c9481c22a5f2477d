"""An offline run ends when its log is used up, waits only for scores that can still arrive, and publishes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app
from offbeat.errors import RunStopped, TaskError
from offbeat.reports.record import RunRecord
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score
from tests.fixtures.tiny_model import save_model

COMMAND = [sys.executable, "-c", "from offbeat.cli.main import main; main()"]


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """The configuration of a run on a log of ten groups, five to a step."""
    save_model(tmp_path / "model")
    with offbeat.ExperienceLog.open(tmp_path / "log", writer="people") as log:
        log.append([
            Group(
                f"g{i}",
                Prompt(f"p{i}", [5, 6], "arithmetic"),
                tuple(Completion(f"g{i}/{j}", [4 + j, 1], UNKNOWN, source="human", score=Score(float(j % 2)))
                      for j in range(4)),
            )
            for i in range(10)
        ])  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(f"""
        steps = 200
        prompts_per_step = 4
        objective.preset = "asymre"
        model = {{ path = "{tmp_path}/model", compute = "float32", serve = "float32" }}
        engine = {{ kind = "hf", max_prompt_tokens = 16 }}
        sampling.max_tokens = 5
        sampler = {{ mode = "offline", epochs = 2 }}
        run = {{ mode = "offline", experience = "{tmp_path}/log" }}
    """)
    return file


def test_check_says_how_many_steps_the_log_holds(toml: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(toml)])
    assert "10 groups × 2 epochs ÷ 4 = 5 steps; you asked for 200" in result.output, result.output
    result = CliRunner().invoke(app, ["check", str(toml), "--set", "prompts_per_step=16"])
    assert "10 groups, all in one batch, × 2 epochs = 2 steps" in result.output, result.output


@pytest.mark.engine
def test_a_run_that_has_used_up_its_log_ends_well(toml: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    done = subprocess.run(
        [*COMMAND, "train", str(toml), "--out", str(place)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ended early: the log is used up" in done.stdout and "resume" not in done.stdout
    run = offbeat.Run(place)
    assert run.state == "finished" and run.metrics.index.tolist() == [1, 2, 3, 4, 5]
    events = list(read(run.directory.events))
    assert [event["groups"] for event in events if event["kind"] == "step"] == [4, 4, 4, 4, 4]
    assert not {"published", "waiting", "worker joined"} & {event["kind"] for event in events}
    assert not run.directory.weights.exists()
    assert "waiting for workers to load" not in [name for name, spent in events[-1]["seconds"].items() if spent]


@pytest.mark.engine
def test_a_log_smaller_than_a_batch_is_trained_whole(toml: Path, tmp_path: Path) -> None:
    config = offbeat.load_config(toml, prompts_per_step=16, sampler={"epochs": None}, steps=3)
    directory = RunDirectory(tmp_path / "run")
    directory.create(config)
    train(config, directory)
    assert [event["groups"] for event in read(directory.events) if event["kind"] == "step"] == [10, 10, 10]


@pytest.mark.engine
@pytest.mark.parametrize("waits", [True, False])
def test_a_run_waits_for_scores_if_it_is_told_to(toml: Path, tmp_path: Path, waits: bool) -> None:
    late = Group("late", Prompt("p", [5, 6], "arithmetic"),
                 tuple(Completion(f"late/{j}", [4 + j, 1], UNKNOWN, source="human") for j in range(4)))  # fmt: skip
    config = offbeat.load_config(toml, prompts_per_step=5, sampler={"epochs": 1, "wait_for_scores": waits})
    directory = RunDirectory(tmp_path / "run")
    directory.create(config)
    with offbeat.ExperienceLog.open(tmp_path / "log", writer="late") as log:
        log.append([late])

        def score_after_two_steps(event: object) -> None:
            assert isinstance(event, dict)
            if waits and event["kind"] == "step" and event["step"] == 2:
                log.score(
                    [offbeat.LateScore("late", one.id, Score(float(j % 2))) for j, one in enumerate(late.completions)]
                )

        train(config, directory, watching=score_after_two_steps)
    *_, ended = events = list(read(directory.events))
    assert [event["groups"] for event in events if event["kind"] == "step"] == ([5, 5, 1] if waits else [5, 5])
    assert ("wait for a score: 1" in ended["why"]) == (not waits)


@pytest.mark.engine
def test_a_cooldown_that_no_step_can_end_is_an_error(toml: Path, tmp_path: Path) -> None:
    config = offbeat.load_config(toml, prompts_per_step=10, sampler={"cooldown": 3})
    directory = RunDirectory(tmp_path / "run")
    directory.create(config)
    with pytest.raises(RunStopped, match=r"sampler\.cooldown keeps all 10 groups back"):
        train(config, directory)


def test_check_counts_groups_without_a_score_apart(toml: Path, tmp_path: Path) -> None:
    with offbeat.ExperienceLog.open(tmp_path / "log", writer="late") as log:
        answers = tuple(Completion(f"late/{j}", [4 + j, 1], UNKNOWN, source="human") for j in range(4))
        log.append([Group("late", Prompt("p", [5, 6], "arithmetic"), answers)])
    output = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["check", str(toml)]).output
    assert "10 groups × 2 epochs" in output and "1 more wait for a score (`offbeat log pending" in output, output


def test_a_run_that_asks_nothing_needs_no_task_and_no_length(toml: Path) -> None:
    unset = toml.read_text().replace("sampling.max_tokens = 5", "")  # 256 by default, and the model reads 64
    for text in (unset, unset + "task.name = 'answers of people'\n"):
        toml.write_text(text)
        result = CliRunner().invoke(app, ["check", str(toml)])
        assert result.exit_code == 0 and "10 groups × 2 epochs" in result.output, result.output
    evaluated = CliRunner().invoke(app, ["check", str(toml), "--set", "evaluation.every=1"])
    assert evaluated.exit_code == 2 and "'answers of people' is not a task" in evaluated.output
    toml.write_text(unset)
    evaluated = CliRunner().invoke(app, ["check", str(toml), "--set", "evaluation.every=1"])
    assert evaluated.exit_code == 2 and "evaluations of an offline run need a task" in evaluated.output


def test_a_run_without_a_task_trains_shows_its_groups_and_can_be_evaluated_on_any_task(
    toml: Path, tmp_path: Path
) -> None:
    toml.write_text(toml.read_text().replace("sampling.max_tokens = 5", ""))
    run = offbeat.train(toml, out=tmp_path / "run", steps=2, progress=False)
    assert run.state == "finished" and run.metrics.index.tolist() == [1, 2]
    assert RunRecord.load(tmp_path / "run").title == "model on stored groups with asymre"
    [group, *_] = run.groups()
    assert (group.prompt.text, group.completions[0].text) == ("23", "1")
    assert repr(group).splitlines()[:3] == [
        "group g0 of task arithmetic: 4 completions", "prompt p0: '23'", "       0  '1'  2 tokens, stop",
    ]  # fmt: skip
    run = offbeat.resume(run, steps=3, progress=False)
    assert run.metrics.index.tolist() == [1, 2, 3]
    with pytest.raises(TaskError, match="has no task; say what to ask"):
        offbeat.evaluate(run)
    [row] = offbeat.evaluate(run, "arithmetic", prompts=2, samples=1, max_tokens=2)
    assert row.prompts == 2
