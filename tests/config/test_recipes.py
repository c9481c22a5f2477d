"""The commands and overrides in the comments of recipes work, and recipes for GPUs fit on the hardware they name."""

import json
import re
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from offbeat.cli.init import annotated, facts, recipes
from offbeat.cli.main import app
from offbeat.config import Config
from offbeat.config.parsing import load
from offbeat.placement.hardware import GIB, Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.shape import ModelShape
from offbeat.preflight.forecast import ModelFiles, Speed, forecast
from tests.fixtures.commands import commands, faults
from tests.fixtures.hub import connected_to, serve_hub

RECIPES = recipes()
ASKED = {
    "quickstart",
    "own-data",
    "smollm2-arithmetic",
    "gsm8k-qwen2.5-0.5b",
    "lag-settings",
    "deepscaler-1.5b",
    "offline-then-online",
    "late-feedback",
    "code",
    "two-nodes",
    "8b-one-node",
    "32b-four-nodes",
    "lora-one-gpu",
    "lora-cpu",
}
MODELS = Path(__file__).parent.parent / "placement" / "models"
ON_THE_HUB = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2.5-0.5b", 494_032_768),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": ("qwen2.5-0.5b", 494_032_768),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2.5-1.5b", 1_543_714_304),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("deepseek-r1-distill-qwen-1.5b", 1_777_088_000),
    "Qwen/Qwen3-8B": ("qwen3-8b", 8_190_735_360),
    "Qwen/Qwen3-32B": ("qwen3-32b", 32_762_123_264),
}
"""The config.json of each model that a recipe trains on GPUs, and its published number of parameters."""
run = CliRunner(env={"COLUMNS": "200"}).invoke


def comment(name: str) -> list[str]:
    """Return the lines of the comment at the top of a recipe, without `#`."""
    return [line.removeprefix("#").strip() for line in RECIPES[name].partition("\n\n")[0].splitlines()]


def overrides(name: str) -> list[list[str]]:
    """Return the settings that each line of the comment overrides."""
    return [*filter(None, (re.findall(r"--set ([^\s;,)]+(?:,[\d.]+\])?)", line) for line in comment(name)))]


def load_recipe(name: str, changes: list[str] | None = None) -> Config:
    with as_file(files("offbeat").joinpath(f"recipes/{name}.toml")) as path:
        return load(path, changes or [])


def hardware(name: str) -> str | None:
    """Return the GPUs that a recipe is for, such as 8x80; None for a recipe that needs none."""
    named = re.search(r"^# hardware: (\S+)$", RECIPES[name], re.M)
    return named[1] if named else None


FOR_GPUS = {name: gpus for name in RECIPES if (gpus := hardware(name))}


def half(gpus: str) -> str:
    """Return half of the hardware: of its nodes, else of its GPUs, else of the memory of its only GPU."""
    whole = Hardware.parse(gpus)
    if whole.nodes > 1:
        return str(Hardware(whole.nodes // 2, whole.gpus, whole.memory_gib))
    if whole.gpus > 1:
        return str(Hardware(1, whole.gpus // 2, whole.memory_gib))
    return str(Hardware(1, 1, whole.memory_gib / 2))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with what the recipes ask for, connected to a stand-in of the hub with small files only."""
    place = tmp_path_factory.mktemp("recipes")
    (place / "problems.jsonl").write_text('{"prompt": "Square x.", "tests": ["assert f(2) == 4"]}\n')
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    with serve_hub() as hub, connected_to(hub, place / "cache"):
        for name, (config, _) in ON_THE_HUB.items():
            small = {"tokenizer.json": b"{}", "tokenizer_config.json": json.dumps(tokenizer).encode()}
            # The sizes come from config.json, so the stand-in needs no weights.
            weights = {"model.safetensors": b"not weights"}
            hub.push(name, {"config.json": (MODELS / f"{config}.json").read_bytes(), **small, **weights})
        yield place
        assert hub.fetched(".safetensors") == [], "a check downloads no weights"


def test_there_is_a_recipe_for_every_published_experiment_and_way_to_run() -> None:
    assert RECIPES.keys() >= ASKED


def test_the_overrides_in_a_recipe_are_valid() -> None:
    for name in RECIPES:
        for changes in [[], *overrides(name)]:
            load_recipe(name, changes)


def test_the_commands_in_a_recipe_exist() -> None:
    lines = [line for name in RECIPES for line in comment(name)]
    written = [line for line in lines if re.match(r"offbeat [a-z]+ (\S+\.\w+|--|\w+/)", line)]
    assert [fault for line in commands("\n".join(written)) for fault in faults(line)] == []


def test_recipes_for_gpus_name_their_hardware_and_say_that_they_were_not_run() -> None:
    assert len(FOR_GPUS) >= 7 and {FOR_GPUS["8b-one-node"], FOR_GPUS["32b-four-nodes"]} == {"8x80", "4x8x80"}
    for name in RECIPES:
        trains_large = load_recipe(name).model.path in ON_THE_HUB
        assert trains_large == (name in FOR_GPUS), name
        if trains_large:
            assert "# Not run by us" in RECIPES[name], name


@pytest.mark.parametrize("name", FOR_GPUS)
def test_memory_and_time_of_a_recipe_are_those_of_its_device_plan(name: str) -> None:
    config, gpus = load_recipe(name), Hardware.parse(FOR_GPUS[name])
    file, parameters = ON_THE_HUB[config.model.path]
    sizes = json.loads((MODELS / f"{file}.json").read_text())
    plan = plan_devices(config, ModelShape.from_config(sizes), gpus)
    engine = plan.engines[0].share * gpus.memory_gib
    files = SimpleNamespace(config=sizes, parameters=parameters)
    seconds = forecast(config, cast("ModelFiles", files)).seconds(Speed(100e12 * gpus.total)) * config.steps
    assert facts(RECIPES[name])["needs"] == (
        f"trainer {plan.rank.peak / GIB:.1f} GiB, engine {engine:.1f} GiB of a GPU; about {seconds / 3600:.0f} h, "
        "estimated"
    )


def test_a_recipe_is_in_the_group_of_its_hardware() -> None:
    for name in RECIPES:
        place, gpus = facts(RECIPES[name])["for"], FOR_GPUS.get(name)
        whole = Hardware.parse(gpus) if gpus else None
        assert (place == "a laptop") == (whole is None), name
        assert (place == "one GPU") == (whole is not None and whole.total == 1), name
        assert place == "a cluster" or whole is None or whole.nodes == 1, name


@pytest.mark.parametrize(("file", "parameters"), sorted(set(ON_THE_HUB.values())))
def test_the_small_files_describe_the_published_models(file: str, parameters: int) -> None:
    assert ModelShape.from_config(json.loads((MODELS / f"{file}.json").read_text())).parameters == parameters


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_and_its_overrides_fit_on_the_hardware_that_it_names(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path(f"{name}.toml").write_text(annotated(RECIPES[name]), encoding="utf-8")
    for words in [[], *overrides(name)]:
        changes = [word for change in words for word in ("--set", change)]
        result = run(app, ["check", f"{name}.toml", "--gpus", FOR_GPUS[name], *changes])
        assert result.exit_code == 0, result.output
        assert f"devices {Hardware.parse(FOR_GPUS[name])}: " in result.output


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_is_refused_on_half_of_its_hardware_with_something_that_fits(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path(f"{name}.toml").write_text(annotated(RECIPES[name]), encoding="utf-8")
    result = run(app, ["check", f"{name}.toml", "--gpus", half(FOR_GPUS[name])])
    assert result.exit_code == 2 and "1 problem; nothing was started" in result.output, result.output
    assert re.search(r"nearest that fits: (use \S+|set \S+ = \S+)", result.output), result.output


def test_the_four_rows_of_the_gsm8k_recipe_are_the_four_of_the_paper() -> None:
    found = [load_recipe("gsm8k-qwen2.5-0.5b", changes) for changes in [[], *overrides("gsm8k-qwen2.5-0.5b")][:4]]
    base = found[2]
    settings = {(one.objective.resolve().zero_variance_mask, one.longest, one.updates_per_batch) for one in found}
    assert settings == {(False, 1, 1), (True, 1, 1), (True, 10, 1), (True, 1, 10)}
    for one in found:
        assert one.objective.preset == "grpo-off-policy"
        assert sum(a != b for a, b in zip(row(one), row(base), strict=True)) <= 1


def row(config: Config) -> tuple[object, ...]:
    return config.objective.resolve(), config.longest, config.updates_per_batch, config.sampler
