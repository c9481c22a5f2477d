"""A run in one process, with real parts and a tiny model."""

import stat
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from offbeat.config import Config, parse
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.feedback import LateScore
from offbeat.experience.ledger import Fate
from offbeat.experience.log import ExperienceLog
from offbeat.run.build import load_tokenizer, make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.learner import fixed_settings
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.seeds import derive
from offbeat.tasks.task import prompt_at
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.types import UNKNOWN, Completion, Group, Json, Prompt, Score
from tests.fixtures.own_learner import own_learner
from tests.fixtures.tiny_model import save_model
from tests.run import synchronous
from tests.run.digits_task import two_digits

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def config(model: Path, **changes: object) -> Config:
    base: dict[str, object] = {
        "steps": 6,
        "prompts_per_step": 4,
        "group_size": 4,
        "model": {"path": str(model), "compute": "float32", "serve": "float32"},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 5},
        "optimizer": {"learning_rate": 1e-3},
        "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
        "trainer": {"save_every": 2},
        "task": {"name": str(HERE / "digits_task.py"), "scorers": 1},
    }
    return parse(base | changes)


def ran(config: Config, place: Path) -> tuple[list[dict], RunDirectory]:
    directory = RunDirectory(place)
    if not directory.events.exists():
        directory.create(config)
    train(config, directory)
    return list(read(directory.events)), directory


def parameters(directory: RunDirectory, config: Config) -> dict[str, torch.Tensor]:
    with Checkpoints(directory.checkpoints, config=fixed_settings(config)) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None
        return dict(newest.policy())


def test_the_next_run_of_a_process_finds_the_memory_of_the_last_one_free(model: Path, tmp_path: Path) -> None:
    asked, directory = config(model, steps=1), RunDirectory(tmp_path / "run")
    directory.create(asked)
    held: list[weakref.ref[torch.nn.Module]] = []
    threads = {*threading.enumerate()}
    train(
        asked,
        directory,
        started=lambda loop: held.append(weakref.ref(own_learner(loop).rank.trainer.policy_model.model)),
    )
    assert [one() for one in held] == [None]
    assert not [one.name for one in threading.enumerate() if one.name.startswith("trainer")]
    for one in {*threading.enumerate()} - threads:
        one.join(10)  # the heartbeat of the lock has been told to end, and may not have run since
        assert not one.is_alive(), one.name


def test_with_v_1_and_i_1_a_lockstep_run_is_synchronous_grpo_bit_for_bit(model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=20, prompts_per_step=4)
    events, directory = ran(asked, tmp_path / "run")
    tokenizer = load_tokenizer(asked)
    order = prompt_at(make_task(asked), tokenizer, derive(0, "prompts"))

    def reward(token_ids: list[int]) -> float:
        return two_digits(tokenizer.decode(token_ids, skip_special_tokens=True), {})

    objective = asked.objective.resolve()
    expected, rewards = synchronous.train(
        model,
        order,
        reward,
        steps=20,
        batch=4,
        size=4,
        tokens=5,
        lr=1e-3,
        clip=(objective.gate.low, objective.gate.high),
    )
    assert [event["metrics"]["reward_mean"] for event in events if event["kind"] == EventKind.STEP] == rewards
    found = parameters(directory, asked)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("every", "updates"), [(1, 1), (1, 4), (10, 1), (4, 2)])
def test_v_and_i_do_exactly_what_they_promise(model: Path, tmp_path: Path, every: int, updates: int) -> None:
    steps = 12
    events, directory = ran(
        config(model, steps=steps, updates_per_batch=updates, sync={"every": every}), tmp_path / "run"
    )
    kinds = Counter(event["kind"] for event in events)
    made = [event for event in events if event["kind"] == EventKind.STEP]
    assert kinds[EventKind.STEP] == steps and kinds[EventKind.PUBLISHED] == 1 + steps // every
    # A step event covers the groups that were trained on; a group of equal rewards is not.
    assert all(event["lags"] == [(event["step"] - 1) % every] * event["groups"] for event in made)
    assert all(1 <= event["groups"] <= 4 for event in made)
    assert sum(event["metrics"]["updates"] for event in made) == steps * updates
    with ExperienceLog.open(directory.experience) as log:
        assert log.size() == steps * 4
        assert log.ledger().generated == steps * 4


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=9, sync={"every": 3})
    whole, directory = ran(asked, tmp_path / "whole")
    cut = RunDirectory(tmp_path / "cut")
    cut.create(asked)
    loops: list[Loop] = []

    def stop_at_5(event: dict) -> None:
        if event["kind"] == EventKind.STEP and event["step"] == 5:
            loops[0].stop("test")

    train(asked, cut, watching=stop_at_5, started=loops.append)
    train(asked, cut)
    found, expected = parameters(cut, asked), parameters(directory, asked)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    metrics = [
        [event["metrics"] | {"tokens_per_second": None} for event in run if event["kind"] == EventKind.STEP]
        for run in (read(cut.events), whole)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("save_every", [100, 2])
def test_a_resumed_run_uses_the_groups_that_a_run_logged_before_it_died(
    model: Path, tmp_path: Path, save_every: int
) -> None:
    asked = config(model, steps=7, sync={"every": 3}, trainer={"save_every": save_every})
    _, directory = ran(asked, tmp_path / "whole")
    cut = RunDirectory(tmp_path / "cut")
    cut.create(asked)

    def die_at_5(event: dict) -> None:
        if event["kind"] == EventKind.STEP and event["step"] == 5:
            raise KeyboardInterrupt("no checkpoint is saved")

    with pytest.raises(KeyboardInterrupt):
        train(asked, cut, watching=die_at_5)
    train(asked, cut)
    found, expected = parameters(cut, asked), parameters(directory, asked)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with ExperienceLog.open(cut.experience) as log:
        assert (log.ledger().repeated, log.ledger().conflicts) == (0, 0)


def test_concurrent_lag_stays_within_its_bound_and_nothing_expires(model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=10, sync={"every": 2}, run={"mode": "concurrent", "max_lag": 4})
    events, directory = ran(asked, tmp_path / "run")
    lags = [lag for event in events if event["kind"] == EventKind.STEP for lag in event["lags"]]
    assert max(lags) <= 4 and 10 <= len(lags) <= 40
    with ExperienceLog.open(directory.experience) as log:
        ledger = log.ledger()
        ledger.check()
        assert "expired" not in ledger.dropped


def test_a_run_learns_offline_from_a_log_then_continues_with_fresh_groups(model: Path, tmp_path: Path) -> None:
    first = config(model, steps=4)
    _, source = ran(first, tmp_path / "first")
    offline = config(
        model, steps=3, run={"mode": "offline", "experience": str(source.experience)}, sampler={"mode": "offline"}
    )
    events, _ = ran(offline, tmp_path / "offline")
    assert [event["kind"] for event in events].count(EventKind.STEP) == 3
    assert not [event for event in events if event["kind"] == EventKind.WORKER_LOST]
    mixed = config(
        model,
        steps=4,
        run={"experience": str(source.experience), "max_lag": 50},
        sampler={"mode": "replay"},
        objective={"preset": "rec-oneside-nois"},
    )
    events, _ = ran(mixed, tmp_path / "mixed")
    replayed = [event["replayed"] for event in events if event["kind"] == EventKind.STEP]
    assert 0 < sum(replayed) < sum(event["groups"] for event in events if event["kind"] == EventKind.STEP)
    with ExperienceLog.open(source.experience) as log:
        assert log.ledger().conflicts == 0


def test_a_run_learns_from_feedback_that_arrives_late(model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=6, prompts_per_step=2, objective={"preset": "reinforce", "zero_variance_mask": False})
    directory = RunDirectory(tmp_path / "run")
    directory.create(asked)
    people = [
        Group(
            f"people-{i}",
            Prompt(f"p{i}", [5, 6], "arithmetic"),
            tuple(Completion(f"people-{i}/{j}", [4 + j, 1], UNKNOWN, source="human") for j in range(4)),
        )
        for i in range(2)
    ]
    with ExperienceLog.open(directory.experience, writer="people") as log:
        log.append(people)

        def judge_at_3(event: Mapping[str, Json]) -> None:
            if event["kind"] == EventKind.STEP and event["step"] == 3:
                scores = [LateScore(one.id, answer.id, Score(float(j % 2))) for one in people
                          for j, answer in enumerate(one.completions)]  # fmt: skip
                log.score(scores)

        train(asked, directory, watching=judge_at_3)
        fates = log.ledger().fates
    assert all(fates[group.id].steps and min(fates[group.id].steps) > 3 for group in people)


def test_a_directory_that_holds_a_run_is_refused(model: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create(config(model))
    directory.events.touch()
    with pytest.raises(RunError, match="offbeat resume"):
        directory.create(config(model))


def test_a_directory_in_which_another_process_makes_a_run_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    lock = directory.create(config(model, steps=3))
    before = directory.config()
    with pytest.raises(RunError, match="in use by process"):
        directory.create(config(model, steps=4))
    assert directory.config() == before
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    del lock  # a run that never began
    directory.create(config(model, steps=4))
    assert directory.config().steps == 4


def test_the_time_budget_sums_to_wall_time(model: Path, tmp_path: Path) -> None:
    events, _ = ran(config(model, steps=3), tmp_path / "run")
    [end] = [event for event in events if event["kind"] == EventKind.ENDED]
    assert sum(end["seconds"].values()) == pytest.approx(end["at"] - events[0]["at"], abs=2.0)


def test_replay_draws_its_share_with_the_settings_as_shipped(model: Path, tmp_path: Path) -> None:
    events, directory = ran(config(model, steps=8, sampler={"mode": "replay"}), tmp_path / "run")
    steps = [event for event in events if event["kind"] == EventKind.STEP]
    assert all(max(event["lags"], default=0) <= len(steps) for event in steps)
    with ExperienceLog.open(directory.experience) as log:
        ledger = log.ledger()
    ledger.check()
    assert ledger.uses > ledger.counts[Fate.TRAINED], "groups of this run were used again"
    measured = [drift for fate in ledger.fates.values() for drift in fate.drift]
    assert measured and all(drift is not None and 0 <= drift <= 1 for drift in measured)


@pytest.mark.parametrize("offset", [1, 3])
def test_an_offset_trains_every_group_exactly_so_many_steps_late(offset: int, model: Path, tmp_path: Path) -> None:
    asked = config(model, steps=8, sync={"every": 1, "offset": offset}, trainer={"save_every": 3})
    events, directory = ran(asked, tmp_path / "run")
    lags = [event["lags"] for event in events if event["kind"] == EventKind.STEP]
    assert [set(one) for one in lags if one] == [{min(k, offset)} for k in range(8) if lags[k]]
    with ExperienceLog.open(directory.experience) as log:
        assert log.ledger().generated == 8 * 4, "nothing is generated for steps after the last"


def test_a_run_that_publishes_by_cost_measures_both_sides(model: Path, tmp_path: Path) -> None:
    asked = config(model, sync={"by_cost": True, "every": 3})
    events, directory = ran(asked, tmp_path / "run")
    reasons = {event["why"] for event in events if event["kind"] == EventKind.PUBLISHED}
    assert reasons <= {"first", "cost", "longest"} and len(reasons) > 1
    with Checkpoints(directory.checkpoints, config=fixed_settings(asked)) as checkpoints:
        newest = checkpoints.newest()
    assert newest is not None
    saved = newest.manifest.extras["evidence"]
    assert saved["costs"] and all(cost > 0 for cost in saved["costs"])
