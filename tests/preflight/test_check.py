"""`offbeat check` reports every problem at once, each with key, value and fix; or it prints the plan."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat import imports as extras
from offbeat.cli.main import app
from offbeat.placement.hardware import Hardware
from offbeat.sandbox import jail, open_sandbox
from tests.fixtures.attacks.broken_configs import GOOD, Broken, cases, make_places

CASES = cases()
run = CliRunner(env={"COLUMNS": "200"}).invoke


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    make_places(root)
    return root


def without_progress(output: str) -> list[str]:
    """Return the lines of a command without those that only show that it works."""
    return [line for line in output.strip().split("\n") if not re.fullmatch(r"[a-z ]+ \.+", line)]


def problems(text: str, tmp_path: Path, *settings: str) -> list[str]:
    """Return the problems that the command reports, without progress and without the count at the end."""
    file = tmp_path / "run.toml"
    file.write_text(text)
    result = run(app, ["check", str(file), *(word for setting in settings for word in ("--set", setting))])
    assert result.exit_code == 2, result.output
    *lines, count = without_progress(result.output)
    assert count.startswith(str(len(lines))) and "nothing was started" in count
    return lines


def test_there_are_forty_broken_files() -> None:
    assert len(CASES) >= 40 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_file_gets_one_message_with_key_value_and_fix(case: Broken, places: Path, tmp_path: Path) -> None:
    lines = problems(case.text(places), tmp_path)
    assert len(lines) == 1, lines
    assert all(part in lines[0] for part in case.says), lines[0]
    assert lines[0].startswith(str(tmp_path / "run.toml")), lines[0]


def test_a_task_that_runs_programs_is_refused_without_a_sandbox(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail.shutil, "which", lambda name, path: None)
    open_sandbox.cache_clear()
    task = f'[task]\nname = "python_code"\noptions = {{ source = "{places}/problems.jsonl" }}\n'
    [line] = problems(task + GOOD.replace("{places}", str(places)), tmp_path)
    assert "task.options" in line and "bwrap is not installed" in line and "apt-get install bubblewrap" in line


def test_all_problems_come_at_once_each_with_its_line(places: Path, tmp_path: Path) -> None:
    text = (
        "group_sise = 8\nsteps = 0\n\n[sync]\nevery = 10\nat_least = 50\n[objective]\npreset = 'grp'\n"
        f"[model]\npath = '{places}/code'\n[task]\nname = 'arithmetik'\n[optimizer]\nbetas = [\n  0.9,\n]\n"
    )
    lines = problems(text, tmp_path)
    found = {int(line.split(":")[1]): line for line in lines}
    assert sorted(found) == [1, 2, 6, 8, 10, 12, 14]
    assert "sync.at_least = 50" in found[6] and "arithmetik" in found[12] and "did you mean 'grpo'" in found[8]


def test_the_default_of_a_faulty_setting_causes_no_second_message(places: Path, tmp_path: Path) -> None:
    text = "[sync]\nevery = 'ten'\nat_least = 5\ndrift_budget = 0.1\n"
    text += f"[model]\npath = '{places}/good'\n[engine]\nkind = 'hf'\n"
    [line] = problems(text + "[sampling]\nmax_tokens = 8", tmp_path)
    assert "sync.every = 'ten'" in line


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("sync.evry=3", "--set sync.evry: sync.evry is not a setting; did you mean 'sync.every'?"),
        ("steps=none", "--set steps: steps = 'none'"),
        ("steps", "--set steps: need KEY=VALUE"),
        ("seed.root=3", "--set seed.root: seed = {'root': 3}"),
    ],
)
def test_a_wrong_override_is_named_as_an_override(setting: str, says: str, places: Path, tmp_path: Path) -> None:
    [line] = problems(GOOD.replace("{places}", str(places)), tmp_path, setting)
    assert says.partition(": ")[2] in line and line.startswith(says.split(":")[0])


def test_a_file_that_is_not_toml_is_named_with_its_line(tmp_path: Path) -> None:
    [line] = problems("steps = 3\nsteps = 4\n", tmp_path)
    assert "is not TOML" in line and "line 2" in line


def test_a_missing_file_gets_a_message_that_names_init(tmp_path: Path) -> None:
    result = run(app, ["check", str(tmp_path / "nothing.toml")])
    assert result.exit_code == 2 and "offbeat init" in result.output


def test_missing_extras_are_named_with_the_command_that_installs_them(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = extras.find_spec
    gone = {"vllm", "ray", "wandb"}
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in gone else real(name))
    text = GOOD.replace("{places}", str(places)).replace('"hf"', '"vllm"')
    lines = problems(text + '[run]\nsinks = ["wandb"]\nplace = "ray"\n', tmp_path)
    assert all(extras.install_command(name) in line for name, line in zip(("vllm", "wandb", "ray"), lines, strict=True))


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        (["group_size=2"], True),
        (["group_size=4"], False),
        (["group_size=2", "objective.advantage=shrunk"], False),
    ],
)
def test_groups_of_two_are_advised_to_use_earlier_results(
    places: Path, tmp_path: Path, settings: list[str], advised: bool
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    result = run(app, ["check", str(file), *(word for setting in settings for word in ("--set", setting))])
    assert result.exit_code == 0, result.output
    assert ('objective.advantage = "shrunk" compares' in result.output) == advised


def test_a_good_file_gets_its_plan_and_estimates(places: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    result = run(app, ["check", str(file), "--set", "sync.every=10", "--set", "objective.preset=grpo"])
    assert result.exit_code == 0, result.output
    assert "32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9" in result.output
    assert "objective grpo: needs behavior; reported for lag up to 20" in result.output
    assert "estimates" in result.output and "AdamW" in result.output and "GFLOP/s" in result.output


@pytest.mark.parametrize(
    ("compute", "serve", "advised"),
    [("bfloat16", "bfloat16", False), ("float32", "float32", False), ("float32", "bfloat16", True)],
)
def test_engines_that_round_a_policy_trained_in_float32_are_named(
    compute: str, serve: str, advised: bool, places: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    result = run(app, ["check", str(file), "--set", f"model.compute={compute}", "--set", f"model.serve={serve}"])
    assert result.exit_code == 0, result.output
    assert ("exports have a rounded policy" in " ".join(result.output.split())) is advised


def test_check_imports_no_torch(places: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    code = (
        "import sys; from offbeat.cli.main import app; app(['check', sys.argv[1]], standalone_mode=False); "
        "print([name for name in ('torch', 'transformers', 'vllm', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert "is valid" in done.stdout and done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_gpus_are_planned_before_a_run_is_created(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(1, 1, 0.5)))
    result = run(app, ["train", str(file), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2 and "nearest that fits" in result.output
    assert not (tmp_path / "run").exists()


def test_check_plans_for_other_hardware_in_python_too(places: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD.replace("{places}", str(places)))
    assert "node 0 GPU 0: rank 0" in offbeat.check(file, gpus="2x24")
    with pytest.raises(offbeat.ConfigError, match="8x80"):
        offbeat.check(file, gpus="8*80")


@pytest.mark.parametrize("budget", [40960, 8192, 512])
def test_the_length_that_is_suggested_is_accepted(budget: int, places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "good", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 40960}))
    text = f"[model]\npath = '{tmp_path}/model'\n[engine]\nkind = 'hf'\n[trainer]\ntoken_budget = {budget}\n"
    [line] = problems(text, tmp_path, "sampling.max_tokens=65536")
    assert "the model reads 40960 tokens, prompt included" in line
    [suggested] = re.findall(r"; set (?:at most )?(.*)$", line)
    changes = [change.replace(" ", "") for change in suggested.split(", ")]
    words = [
        word for change in changes for word in ("--set", change if "=" in change else f"sampling.max_tokens={change}")
    ]
    result = run(app, ["check", str(tmp_path / "run.toml"), *words])
    assert result.exit_code == 0, result.output
