"""Evaluation in real runs with a tiny model: on the engines, on the trainer's model, and after a resume."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.log import ExperienceLog
from offbeat.rollout.hf import HfEngine
from offbeat.run.build import load_tokenizer, make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation.rates import PolicyEvaluation
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.scoring.pool import ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.split import evaluation_set
from offbeat.types import Json
from offbeat.weights.subscriber import Subscription
from tests.run.test_local import config, model, parameters, ran

pytestmark = pytest.mark.engine
__all__ = ["model"]


def evaluated(events: list[dict]) -> dict[int, object]:
    return {event["version"]: event["pass@1"] for event in events if event["kind"] == EventKind.EVALUATED}


def rates_of_the_model(asked: Config, directory: RunDirectory, version: int) -> Mapping[str, Json]:
    task = make_task(asked)

    async def go() -> Mapping[str, Json]:
        engine = HfEngine.start(Path(asked.model.path), dtype="float32")
        with Subscription.open(directory.weights, name="test") as policies, ScoringPool.of(task, workers=1) as pool:
            await engine.load(version, policies.fetch(version).items())
            return await PolicyEvaluation(asked, task, load_tokenizer(asked), pool, engine.model)(version)

    return asyncio.run(go())


def test_the_engines_give_the_same_answers_as_the_model_itself(model: Path, tmp_path: Path) -> None:
    asked = config(model, evaluation={"every": 3, "prompts": 20, "samples": 6}, workers={"groups_at_once": 4})
    events, directory = ran(asked, tmp_path / "run")
    rates = evaluated(events)
    assert list(rates) == [0, 3, 6]
    assert rates[6] == rates_of_the_model(asked, directory, 6)["pass@1"]
    with ExperienceLog.open(directory.experience) as log:
        assert log.ledger().generated == asked.steps * asked.prompts_per_step, "evaluation leaves no groups"


def test_evaluation_moves_no_random_stream_of_training(model: Path, tmp_path: Path) -> None:
    plain, measured = (config(model, evaluation={"every": n, "prompts": 8, "hold_out": 0.1}) for n in (0, 2))
    ran(plain, tmp_path / "plain")
    ran(measured, tmp_path / "measured")
    theirs = parameters(RunDirectory(tmp_path / "plain"), plain)
    for name, tensor in parameters(RunDirectory(tmp_path / "measured"), measured).items():
        assert tensor.equal(theirs[name]), name


def test_with_a_longer_period_published_versions_are_evaluated_and_the_last_policy_too(
    model: Path, tmp_path: Path
) -> None:
    asked = config(model, steps=6, sync={"every": 4}, evaluation={"every": 2, "prompts": 8})
    events, _ = ran(asked, tmp_path / "run")
    assert list(evaluated(events)) == [0, 4, 6]
    published = [(event["version"], event["why"]) for event in events if event["kind"] == EventKind.PUBLISHED]
    assert published == [(0, "first"), (4, "longest"), (6, "last")] or published[-1] == (6, "last")


def test_a_run_that_is_given_more_steps_continues_as_if_it_had_not_ended(model: Path, tmp_path: Path) -> None:
    short, whole = (
        config(model, steps=steps, sync={"every": 4}, evaluation={"every": 2, "prompts": 8}) for steps in (6, 10)
    )
    ran(short, tmp_path / "twice")
    twice, _ = ran(whole, tmp_path / "twice")
    once, _ = ran(whole, tmp_path / "once")
    theirs = parameters(RunDirectory(tmp_path / "once"), whole)
    for name, tensor in parameters(RunDirectory(tmp_path / "twice"), whole).items():
        assert tensor.equal(theirs[name]), name
    assert evaluated(twice) == {**evaluated(once), 6: evaluated(twice)[6]}


def test_an_evaluation_under_way_at_a_crash_is_repeated(model: Path, tmp_path: Path) -> None:
    asked = config(model, evaluation={"every": 2, "prompts": 8}, trainer={"save_every": 1})
    directory = RunDirectory(tmp_path / "run")
    directory.create(asked)

    def crash_at_4(loop: Loop) -> None:
        rates = loop.rounds.rates

        async def crashing(version: int) -> Mapping[str, Json]:
            found = await rates(version)
            if version == 4:
                raise RuntimeError("the process ended")
            return found

        loop.rounds.rates = crashing

    with pytest.raises(RuntimeError, match="the process ended"):
        train(asked, directory, started=crash_at_4)
    train(asked, directory)
    plain, _ = ran(asked, tmp_path / "plain")
    assert evaluated(list(read(directory.events))) == evaluated(plain)


def test_in_concurrent_mode_training_continues_during_an_evaluation(model: Path, tmp_path: Path) -> None:
    asked = config(
        model,
        steps=12,
        run={"mode": "concurrent", "max_lag": 6},
        sync={"every": 4},
        evaluation={"every": 4, "prompts": 8},
    )
    events, _ = ran(asked, tmp_path / "run")
    assert list(evaluated(events)) == [0, 4, 8, 12]


def test_a_run_without_workers_evaluates_the_trainers_model_in_batches(model: Path, tmp_path: Path) -> None:
    donor = config(model, steps=4)
    _, directory = ran(donor, tmp_path / "donor")
    sizes: list[int] = []
    generate = HfEngine.generate

    async def watched(engine: HfEngine, requests: list) -> list:
        sizes.append(sum(request.size for request in requests))
        return await generate(engine, requests)

    asked = config(
        model, steps=2, run={"mode": "offline", "experience": str(directory.experience)}, sampler={"mode": "offline"},
        evaluation={"every": 1, "prompts": 10, "samples": 2}, workers={"groups_at_once": 4}, sync={"every": 5},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(HfEngine, "generate", watched)
        events, _ = ran(asked, tmp_path / "offline")
    assert list(evaluated(events)) == [0, 1, 2] and sizes == [8, 8, 4] * 3


def trained_prompts(directory: RunDirectory) -> set[str]:
    with ExperienceLog.open(directory.experience) as log:
        return {str(group.prompt.columns["prompt"]) for group in log.groups()}


OWN = """
examples = [{"prompt": f"{n}+{m}="} for n in range(5) for m in range(5)] * 2
def reward(text, columns):
    return float(any(character.isdigit() for character in text))
"""


def test_a_run_with_a_file_of_ones_own_is_evaluated_on_prompts_it_never_trains_on(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    asked = config(
        model, steps=10, task={"name": str(file), "scorers": 1}, evaluation={"every": 10, "samples": 2, "greedy": True}
    )
    events, directory = ran(asked, tmp_path / "run")
    held_out = evaluation_set(make_task(asked), 64, derive(0, "evaluation"))
    prompts = {str(example.prompt) for example in held_out.examples}
    assert len(prompts) == 5 and len(trained_prompts(directory)) == 20 and not prompts & trained_prompts(directory)
    last = [event for event in events if event["kind"] == EventKind.EVALUATED][-1]
    assert (last["prompts"], last["distinct"], last["samples"], last["held_out"], last["k"]) == (5, 5, 16, True, 2)
    assert {"pass@1", "pass@k", "greedy pass@1", "mean reward"} <= last.keys()


def test_a_run_is_evaluated_by_another_task_with_its_own_reward(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text(OWN.split("def")[0] + "def reward(text, columns, *, never=-1.0):\n    return never\n")
    file.write_text(file.read_text() + "reward_range = (-1.0, 0.0)\n")
    asked = config(model, steps=1, evaluation={"every": 1, "task": str(file), "prompts": 25})
    events, _ = ran(asked, tmp_path / "run")
    last = [event for event in events if event["kind"] == EventKind.EVALUATED][-1]
    assert last["mean reward"][0] == -1.0 and last["distinct"] == 25 and last["held_out"] and not last["unscorable"]
    [step] = [event for event in events if event["kind"] == EventKind.STEP]
    assert step["metrics"]["reward_mean"] >= 0


def test_an_offline_run_is_not_evaluated_on_the_prompts_of_its_log(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    task = {"name": str(file), "scorers": 1}
    _, donor = ran(config(model, steps=3, task=task), tmp_path / "donor")
    offline = {"run": {"mode": "offline", "experience": str(donor.experience)}, "sampler": {"mode": "offline"}}
    asked = config(model, steps=1, task=task, evaluation={"every": 1, "hold_out": 0.9}, **offline)
    events, _ = ran(asked, tmp_path / "offline")
    last = [event for event in events if event["kind"] == EventKind.EVALUATED][-1]
    trained = trained_prompts(donor)
    held_out = {str(example.prompt) for example in make_task(asked).evaluation.examples}  # type: ignore[union-attr]
    assert trained and held_out and not trained & held_out and last["distinct"] == len(held_out) < 22
