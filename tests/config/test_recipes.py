"""The commands and overrides in the comments of recipes work and give valid configurations."""

import re
from importlib.resources import as_file, files

import pytest

from lab.site.commands import commands, faults
from offbeat.cli.init import recipes
from offbeat.config import Config
from offbeat.config.toml_file import load

RECIPES = recipes()
ASKED = {
    "quickstart",
    "smollm2-arithmetic",
    "gsm8k-qwen2.5-0.5b",
    "lag-settings",
    "deepscaler-1.5b",
    "offline-then-online",
    "late-feedback",
    "code",
    "two-nodes",
}


def comment(name: str) -> list[str]:
    """Return the lines of the comment at the top of a recipe, without `#`."""
    return [line.removeprefix("#").strip() for line in RECIPES[name].partition("\n\n")[0].splitlines()]


def test_there_is_a_recipe_for_every_published_experiment_and_way_to_run() -> None:
    assert RECIPES.keys() >= ASKED


@pytest.mark.parametrize("name", RECIPES)
def test_the_overrides_in_a_recipe_are_valid(name: str) -> None:
    lines = [re.findall(r"--set ([^\s;,)]+(?:,[\d.]+\])?)", line) for line in comment(name)]
    with as_file(files("offbeat").joinpath(f"recipes/{name}.toml")) as path:
        for overrides in [[], *filter(None, lines)]:
            load(path, overrides)


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_in_a_recipe_exist(name: str) -> None:
    lines = [line for line in comment(name) if re.match(r"offbeat [a-z]+ (\S+\.\w+|--|\w+/)", line)]
    assert [fault for line in commands("\n".join(lines)) for fault in faults(line)] == []


def test_the_four_rows_of_the_gsm8k_recipe_are_the_four_of_the_paper() -> None:
    with as_file(files("offbeat").joinpath("recipes/gsm8k-qwen2.5-0.5b.toml")) as path:
        rows = [[], *filter(None, (re.findall(r"--set (\S+)", line) for line in comment("gsm8k-qwen2.5-0.5b")))]
        found = [load(path, row) for row in rows[:4]]
    base = found[2]
    settings = {(one.objective.resolve().zero_variance_mask, one.longest, one.updates_per_batch) for one in found}
    assert settings == {(False, 1, 1), (True, 1, 1), (True, 10, 1), (True, 1, 10)}
    for one in found:
        assert one.objective.preset == "grpo-off-policy"
        assert sum(a != b for a, b in zip(row(one), row(base), strict=True)) <= 1


def row(config: Config) -> tuple[object, ...]:
    return config.objective.resolve(), config.longest, config.updates_per_batch, config.sampler
