"""Real runs on a tiny model: a log at a URI, and episodes of several turns trained offline."""

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.ledger import Fate
from offbeat.experience.log import ExperienceLog
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.tasks.turns import Calculator, Turn, play
from offbeat.types import Completion, Group, Prompt, Score
from tests.fixtures.tiny_model import load_tokenizer
from tests.run.test_local import config, model

__all__ = ["model"]  # a fixture

pytestmark = pytest.mark.engine


def steps_of(config: Config, place: Path) -> tuple[list[dict], RunDirectory]:
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory)
    return [event for event in read(directory.events) if event["kind"] == EventKind.STEP], directory


def test_a_run_uses_an_experience_log_at_a_uri_and_keeps_the_rest_in_its_directory(model: Path, tmp_path: Path) -> None:
    uri = f"file-object-store://{tmp_path}/log"
    with ExperienceLog.open(uri):
        pass
    steps, directory = steps_of(config(model, steps=2, run={"experience": uri}), tmp_path / "run")
    assert len(steps) == 2 and directory.weights.is_dir() and directory.checkpoints.is_dir()
    assert not directory.experience.exists()


def test_episodes_of_several_turns_are_trained_offline(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)

    def episode(name: str, reward: float) -> Completion:
        lines = iter(["17*25 is <calc>17*25</calc>", "425"])

        def generate(so_far: object) -> Turn:
            ids = tokenizer.encode(next(lines), add_special_tokens=False)
            return Turn(ids, [-1.0] * len(ids), version=3)

        played = play(Calculator(), generate, tokenizer.encode, tokenizer.decode, max_tokens=200)
        return replace(played.completion(name), score=Score(reward), versions=(), source="model:mine")

    prompt = Prompt("mul", tokenizer.encode("17*25?", add_special_tokens=False), "calculator")
    groups = [Group(f"g{g}", prompt, tuple(episode(f"g{g}/{i}", float(i)) for i in range(2))) for g in range(2)]
    with ExperienceLog.open(tmp_path / "log") as log:
        assert len(log.append(groups).accepted) == 2
    asked = config(
        model,
        steps=1,
        prompts_per_step=2,
        run={"mode": "offline", "experience": str(tmp_path / "log")},
        sampler={"mode": "offline", "epochs": 1},
    )
    steps, _ = steps_of(asked, tmp_path / "run")
    own = sum(int(one.loss_mask.sum()) for group in groups for one in group.completions)
    assert [step["groups"] for step in steps] == [2] and steps[0]["metrics"]["trained_tokens"] == own
    assert own < sum(len(one.token_ids) for group in groups for one in group.completions)
    with ExperienceLog.open(tmp_path / "log") as log:
        assert {one.fate for one in log.ledger().fates.values()} == {Fate.TRAINED}
