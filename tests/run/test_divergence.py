"""What a step destroyed is noticed before it is published or saved, and the way back is kept and named."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.errors import RunStopped
from offbeat.run.cadence import Drift, PublishReason, StepEvidence
from offbeat.run.directory import RunDirectory
from offbeat.run.health import DEFAULT_RULES, Action, Health, Rule, rules_for
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.trainer.checkpoint import kept, saved_folders
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.trainer import Trained
from offbeat.types import Json, PublishedDrift
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import small_batch, small_trainer
from tests.fixtures.tiny_model import save_model

HERE = Path(__file__).parent


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=str)
def test_nan_and_infinity_never_pass_a_rule_silently(rule: Rule) -> None:
    assert rule.is_broken({rule.metric: math.nan})
    worst = math.inf if rule.above is not None else -math.inf
    assert rule.is_broken({rule.metric: worst})
    health = Health([rule])
    fired = [health.check({rule.metric: math.nan}, [], {}, step) for step in range(1, rule.patience + 1)]
    assert [len(alarms) for alarms in fired] == [0] * (rule.patience - 1) + [1]


def test_a_drift_of_nan_is_published_at_once() -> None:
    since = [StepEvidence(PublishedDrift(tokens=512, tv=math.nan))]
    assert Drift(budget=0.5).due(since, None) is PublishReason.DRIFT


def test_a_step_may_move_the_policy_as_far_as_the_setting_allows() -> None:
    rules = {rule.metric: rule for rule in rules_for(parse({"optimizer": {"max_step_drift": 0.2}}))}
    assert rules["drift_step"].above == 0.2 and rules["drift_step"].action is Action.STOP
    anything = next(iter(rules_for(parse({"optimizer": {"max_step_drift": 1.0}}))))
    assert not anything.is_broken({"drift_step": 1.0}) and anything.is_broken({"drift_step": math.nan})


def test_the_newest_checkpoint_up_to_the_last_healthy_step_is_kept_beside_the_newest() -> None:
    assert kept([40, 42, 44, 46], 2, healthy=41) == {40, 44, 46}
    assert kept([40, 42, 44, 46], 2, healthy=45) == {44, 46}
    assert kept([40, 42, 44, 46], 2, healthy=46) == {44, 46}
    assert kept([40, 42, 44, 46], 2, healthy=39) == {44, 46}
    assert kept([40, 42], 2, healthy=None) == {40, 42}, "checkpoints of earlier releases do not say"


def test_over_any_course_of_saves_one_checkpoint_more_is_kept_at_most() -> None:
    health, saved = Health([Rule("ess", below=0.5)]), [0]
    course = [0.9] * 3 + [0.1] * 9 + [0.9] * 2 + [0.1] * 5
    for step, ess in enumerate(course, start=1):
        health.check({"ess": ess}, [], {}, step)
        saved = sorted(kept([*saved, step], 2, health.healthy))
        assert len(saved) <= 3 and saved[-1] == step
        assert max(one for one in saved if one <= health.healthy) == health.healthy


def test_the_way_back_names_the_checkpoint_from_before_a_rule_broke(tmp_path: Path) -> None:
    for step in (0, 4, 8):
        folder = tmp_path / "checkpoints" / f"step-{step:010}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    steep = parse({"optimizer": {"learning_rate": 5e-4, "weight_decay": 100.0}}).optimizer
    health = Health([Rule("ess", below=0.5)], run=str(tmp_path), optimizer=steep)
    for step in range(1, 10):
        health.check({"ess": 0.9 if step < 6 else 0.1}, [], {}, step)
    assert health.way_back() == (
        "continue from the checkpoint of step 4, from before any rule broke: "
        f"offbeat resume {tmp_path} --from-step 4 --set optimizer.learning_rate=5e-05 --set optimizer.weight_decay=0"
    )
    health.optimizer, health.healthy = parse({"optimizer": {"learning_rate": 1e6}}).optimizer, 3
    assert "the model, from before any rule broke" in health.way_back()
    assert health.way_back().endswith("--from-step 0 --set optimizer.learning_rate=1e-06")


class TestOverflow:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38, 1e6])
    @pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
    def test_a_weight_or_moment_that_overflowed_is_named(self, kind: str, value: float) -> None:
        trainer = small_trainer("grpo")
        assert isinstance(trainer.train(small_batch(0)), Trained)
        name = next(one for one in trainer.optimizer.tensors() if one.startswith(f"{kind}/") and "mlp.up" in one)
        trainer.optimizer.tensors()[name].view(-1)[-1] = value
        found = [one for one, flag in trainer.optimizer.overflows().items() if flag]
        assert found == ([] if kind != "master" and math.isfinite(value) else [name])

    def test_a_healthy_step_moves_the_policy_a_little_and_overflows_nothing(self) -> None:
        done = small_trainer("grpo").train(small_batch(0))
        assert isinstance(done, Trained) and done.overflowed == ()
        assert 0 < done.metrics["drift_step"] < 0.2

    def test_the_drift_of_a_step_grows_with_the_learning_rate(self) -> None:
        drifts = []
        for rate in (1e-4, 1e-2, 1.0):
            trainer = small_trainer("grpo")
            schedule = replace(trainer.optimizer.settings.schedule, peak=rate)
            trainer.optimizer.settings = replace(trainer.optimizer.settings, schedule=schedule)
            done = trainer.train(small_batch(0))
            assert isinstance(done, Trained)
            drifts.append(done.metrics["drift_step"])
        assert drifts == sorted(drifts) and drifts[0] < 0.05 and drifts[-1] > 0.5


def broken_on_two(ranks: Ranks) -> Json:
    """Take a step at a rate of 1e6 and say what this rank found."""
    torch.set_num_threads(1)
    trainer = small_trainer("grpo", ranks=ranks, sharded=True)
    schedule = replace(trainer.optimizer.settings.schedule, peak=1e6)
    trainer.optimizer.settings = replace(trainer.optimizer.settings, schedule=schedule)
    done = trainer.train(small_batch(0))
    assert isinstance(done, Trained)
    return {"overflowed": [*done.overflowed], "nan": math.isnan(done.metrics["drift_step"])}


@pytest.mark.engine
def test_two_ranks_find_the_same_overflow() -> None:
    one, other = run_ranks(broken_on_two, 2)
    assert isinstance(one, dict) and one == other and one["nan"] and one["overflowed"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return {
        "steps": 4,
        "prompts_per_step": 4,
        "group_size": 4,
        "model": {"path": str(place), "compute": "float32", "serve": "float32"},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 5},
        "optimizer": {"learning_rate": 1e-4},
        "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
        "trainer": {"save_every": 1},
        "task": {"name": str(HERE / "digits_task.py"), "scorers": 1},
    }


def saved(directory: RunDirectory) -> list[int]:
    return [int(folder.name.rpartition("-")[2]) for folder in saved_folders(directory.checkpoints)]


@pytest.mark.engine
def test_a_run_goes_back_to_a_step_and_removes_later_checkpoints_only_once_it_has_a_new_one(
    settings: dict[str, object], tmp_path: Path
) -> None:
    directory, run = RunDirectory(tmp_path / "run"), CliRunner().invoke
    directory.create(parse(settings))
    train(parse(settings), directory)
    assert saved(directory) == [3, 4]
    missing = run(app, ["resume", str(directory.path), "--from-step", "1"])
    assert missing.exit_code == 2 and "there is no checkpoint of step 1; give one of [0, 3, 4]" in missing.output
    other = run(app, ["resume", str(directory.path), "--set", "sync.every=2"])
    assert other.exit_code == 2 and "may change settings of [optimizer] only, not sync.every=2" in other.output
    started = run(app, ["resume", str(directory.path), "--set", "optimizer.dither=false"])
    assert started.exit_code == 2 and "decides where masters start, and this run has begun" in started.output
    assert saved(directory) == [3, 4]
    lower = ["--from-step", "3", "--set", "optimizer.learning_rate=1e-5"]
    again = run(app, ["resume", str(directory.path), *lower])
    assert again.exit_code == 0, again.output
    assert saved(directory) == [3, 4] and not [*directory.checkpoints.glob("superseded-*")]
    assert directory.config().optimizer.learning_rate == 1e-5
    [changed] = [event for event in read(directory.events) if event["kind"] == "inputs changed"]
    assert changed["what"] == ["optimizer.learning_rate is 1e-05 and was 0.0001"]
    checked = run(app, ["fsck", str(directory.path)])
    assert checked.exit_code == 0, checked.output


@pytest.mark.engine
def test_a_rule_that_broke_keeps_the_checkpoint_from_before_while_later_ones_come_and_go(
    settings: dict[str, object], tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "run")
    asked = parse(settings | {"steps": 9})
    directory.create(asked)
    breaks = dict.fromkeys(range(4, 9), 0.0)

    def strike(loop) -> None:  # type: ignore[no-untyped-def]
        check = loop.health.check
        loop.health.check = lambda metrics, groups, drift, step: check(
            {"reward_mean": breaks.get(step, 0.9)}, groups, drift, step
        )
        loop.health.rules = [Rule("reward_mean", below=0.5, patience=2)]

    seen: dict[int, list[int]] = {}
    train(
        asked,
        directory,
        started=strike,
        watching=lambda event: seen.update({event["step"]: saved(directory)}) if event["kind"] == "step" else None,
    )
    assert all(3 in seen[step] and len(seen[step]) <= 4 for step in (6, 7, 8, 9)), seen
    assert saved(directory) == [8, 9], "the rule holds again, so the newest are enough"
    manifest = json.loads((saved_folders(directory.checkpoints)[0] / "manifest.json").read_text())
    assert manifest["extras"]["healthy"] == 3


@pytest.mark.engine
def test_a_run_that_diverges_later_names_its_last_checkpoint(settings: dict[str, object], tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    asked = parse(settings)
    directory.create(asked)

    def strike(loop) -> None:  # type: ignore[no-untyped-def]
        check = loop.health.check
        loop.health.check = lambda metrics, groups, drift, step: check(
            {"drift_step": math.nan if step == 3 else 0.01}, groups, drift, step
        )

    with pytest.raises(RunStopped, match=r"step 3 diverged at a learning rate of 0\.0001") as stopped:
        train(asked, directory, started=strike)
    assert "continue from the checkpoint of step 2, from before any rule broke" in str(stopped.value)
    assert saved(directory)[-1] == 2
    assert [event["version"] for event in read(directory.events) if event["kind"] == "published"] == [0, 1, 2]
