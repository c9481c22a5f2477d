"""What a run cannot do with a task or a log is refused before it starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.experience.log import ExperienceLog
from tests.fixtures.attacks.broken_configs import GOOD, make_places

run = CliRunner(env={"COLUMNS": "200"}).invoke
TASK = """
examples = [{"prompt": "17*25?", "answer": "425"}]

def reward(text, columns):
    return float(columns["answer"] in text)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    make_places(root)
    (root / "signed.py").write_text(TASK + "reward_range = (-1.0, 1.0)\n")
    return root


def asked(command: str, places: Path, tmp_path: Path, *settings: str) -> tuple[int, str]:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    words = [word for setting in settings for word in ("--set", setting)]
    result = run(app, [command, str(file), *words])
    return result.exit_code, " ".join(result.output.split())


def test_shrunk_advantages_need_rewards_from_0_to_1(places: Path, tmp_path: Path) -> None:
    code, says = asked("check", places, tmp_path, f"task.name={places}/signed.py", 'objective.advantage="shrunk"')
    assert code == 2 and "needs rewards from 0 to 1" in says


def test_imported_groups_may_have_any_age(places: Path, tmp_path: Path) -> None:
    settings = [f"run.experience={places}/log", "sampler.mode=replay"]
    code, says = asked("check", places, tmp_path, *settings, "objective.preset=red-weight")
    assert code == 0 and "holds groups without a policy version, of any age, and nobody has shown that" in says
    assert "evidence.a.sums.red-weight-v" in says


@pytest.mark.parametrize("preset", ["red-drop", "red-weight", "red-weight-adaptive", "asymre", "imitate"])
def test_what_needs_no_log_probs_runs_on_rewards_alone(preset: str, places: Path, tmp_path: Path) -> None:
    offline = ["run.mode=offline", "sampler.mode=offline", f"run.experience={places}/log"]
    code, says = asked("check", places, tmp_path, *offline, f"objective.preset={preset}")
    assert code == 0 and "nobody has shown" in says, says
    code, says = asked("check", places, tmp_path, *offline, "objective.preset=grpo")
    assert code == 2 and "none of the 3 groups" in says and preset in says


def test_imitating_needs_rewards_that_are_not_negative(places: Path, tmp_path: Path) -> None:
    code, says = asked("check", places, tmp_path, f"task.name={places}/signed.py", "objective.preset=imitate")
    assert code == 2 and "negative ones push without limit" in says


def test_a_lag_that_is_known_to_lose_needs_accept(places: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    words = ["check", str(file), "--set", "objective.preset=reinforce", "--set", "sync.every=10"]
    refused, accepted = run(app, words), run(app, [*words, "--accept"])
    assert refused.exit_code == 2 and "known to lose" in refused.output and "--accept" in refused.output
    assert accepted.exit_code == 0 and "warning: sync.every = 10 gives lag up to 9, which is known" in accepted.output
    assert "--set accept=true" in accepted.output, "the command that starts it"


def test_a_run_creates_an_experience_log_at_a_uri(places: Path, tmp_path: Path) -> None:
    uri = f"file-object-store://{tmp_path}/log"
    code, says = asked("check", places, tmp_path, f"run.experience={uri}")
    assert code == 0, says
    with ExperienceLog.open(uri):
        code, says = asked("check", places, tmp_path, f"run.experience={uri}")
    assert code == 0, says
