"""The table [adapter]: what it accepts, what it refuses with a sentence, and what `offbeat check` says about it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import examine, parse
from offbeat.config.sections import LINEAR_LAYERS
from offbeat.errors import ConfigError
from tests.fixtures.tiny_model import save_model


def test_without_a_rank_all_weights_are_trained() -> None:
    assert parse({}).adapter.rank == 0


def test_targets_are_the_linear_layers_without_the_head_or_those_that_are_named() -> None:
    assert parse({"adapter": {"rank": 8}}).adapter.names == LINEAR_LAYERS
    assert "lm_head" not in LINEAR_LAYERS and len(LINEAR_LAYERS) == 7
    assert parse({"adapter": {"rank": 8, "targets": ["q_proj", "v_proj"]}}).adapter.names == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ([r".*\.(q|v)_proj"], "is not the name of a layer; patterns and paths are not supported"),
        (r".*q_proj", "is not the name of a layer"),
        (["model.layers.0.self_attn.q_proj"], "is not the name of a layer"),
        ("q_proj", 'write a list, ["q_proj"]'),
        ([], "is empty"),
        (["q_proj", "q_proj"], "names a layer twice"),
    ],
)
def test_patterns_and_paths_are_refused_with_a_sentence(targets: object, says: str) -> None:
    [problem] = examine({"adapter": {"rank": 8, "targets": targets}}).problems
    assert problem.startswith("adapter.targets = ") and says in problem


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapter": {"alpha": 16.0}}, "adapter.alpha = 16 has no effect without adapter.rank"),
        ({"adapter": {"targets": ["q_proj"]}}, "adapter.targets = ['q_proj'] has no effect without adapter.rank"),
        (
            {"adapter": {"rank": 8}, "objective": {"kl_coefficient": 0.1}, "reference": {"refresh_every": 5}},
            "reference.refresh_every = 5: with adapter.rank = 8 the reference policy is the model without its adapter",
        ),
        ({"adapter": {"rank": 8}, "sync": {"anchor_every": 5}}, "sync.anchor_every = 5: with adapter.rank = 8 every"),
        ({"adapter": {"rank": 8, "dropout": 0.1}}, "adapter.dropout is not a setting"),
        ({"adapter": {"rank": -1}}, "adapter.rank = -1"),
        ({"lora_rank": 8}, "did you mean 'adapter.rank'?"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(settings)
    assert len(error.value.problems) == 1 and says in error.value.problems[0]


@pytest.mark.parametrize(("rate", "advised"), [(1e-6, True), (5e-5, False)])
def test_check_advises_ten_times_the_rate_of_full_training(tmp_path: Path, rate: float, advised: bool) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(
        f'model.path = "{tmp_path}/model"\nmodel.serve = "float32"\nengine.kind = "hf"\nadapter.rank = 4\n'
        f"optimizer.learning_rate = {rate}\nengine.max_prompt_tokens = 32\nsampling.max_tokens = 8\n"
    )
    said = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])
    assert said.exit_code == 0, said.output
    assert "adapter of rank 4 beside q_proj" in said.output
    assert ("try 1e-05" in said.output) == advised
