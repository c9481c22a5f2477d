"""`offbeat gap` on real runs: every part of a known mismatch is found, with adapters and with vLLM too."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.parity.gap import MISMATCHES, injected
from offbeat import Run
from offbeat.cli.main import app
from offbeat.errors import RunError
from offbeat.run.directory import RunDirectory
from offbeat.weights.publisher import WeightLog
from tests.fixtures.tiny_model import save_llama, save_model
from tests.run.test_local import config, ran

pytestmark = pytest.mark.engine
run = CliRunner(env={"COLUMNS": "200"}).invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def trained(model: Path, place: Path, **changes: object) -> RunDirectory:
    return ran(config(model, **({"sync": {"every": 1, "offset": 2}} | changes)), place)[1]


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_part_of_a_known_mismatch_is_found(name: str, tmp_path: Path) -> None:
    figure = injected(name, 6, tmp_path)
    assert figure.holds, figure
    assert f"late weights: {bool(MISMATCHES[name].late)}" in figure.note


def test_what_is_computed_again_is_what_the_trainer_recorded(model: Path, tmp_path: Path) -> None:
    sampling = {"max_tokens": 5, "temperature": 0.7}
    found = Run(trained(model, tmp_path / "run", sampling=sampling).path).gap()
    assert found.sources.keys() == {"published"} and {one.lag for one in found.rows} == {"0", "1", "2-3"}
    assert "compute alike" in found.verdict
    for row in found.rows:
        assert row.whole and row.lagged and row.whole.tv == pytest.approx(row.recorded, rel=1e-4, abs=1e-6)
        assert row.whole.shift == pytest.approx(row.engine.shift + row.lagged.shift)


def test_an_adapter_is_computed_beside_its_base(model: Path, tmp_path: Path) -> None:
    adapted = trained(model, tmp_path / "run", adapter={"rank": 4}, optimizer={"learning_rate": 1e-2})
    total = Run(adapted.path).gap().total
    assert total.engine.size < 1e-5 and total.whole
    assert total.whole.tv == pytest.approx(total.recorded, rel=1e-3) and total.whole.tv > 0.01


def test_a_policy_that_was_not_kept_is_fitted_to_what_was_recorded(model: Path, tmp_path: Path) -> None:
    found = Run(trained(model, tmp_path / "run", sync={"every": 4}, trainer={"save_every": 100}).path).gap()
    assert found.sources.keys() == {"published", "fitted"} and found.total.whole
    assert found.total.whole.tv == pytest.approx(found.total.recorded, rel=1e-3)


def test_tokens_of_versions_that_are_gone_are_counted_and_a_run_without_any_is_refused(
    model: Path, tmp_path: Path
) -> None:
    directory = trained(model, tmp_path / "run", sync={"every": 1, "offset": 2, "anchor_every": 1})
    whole = Run(directory.path).gap(groups=4)
    assert whole.groups == 4 < whole.trained and whole.gone == 0
    with WeightLog.open(directory.weights, keep=4) as weights:
        weights.retire()
    assert Run(directory.path).gap().gone > 0
    with WeightLog.open(directory.weights) as weights:
        weights.rewind(-1)
    with pytest.raises(RunError, match="no token of"):
        Run(directory.path).gap()


def test_versions_of_groups_that_wait_to_be_trained_are_kept(model: Path, tmp_path: Path) -> None:
    directory = trained(
        model, tmp_path / "run", steps=26, prompts_per_step=1, sync={"every": 1, "offset": 24, "anchor_every": 1}
    )
    # The last step trained on version 1 of 26. By default a weight log keeps 20.
    found = Run(directory.path).gap()
    assert found.gone == 0 and found.total.lagged and "16-31" in {row.lag for row in found.rows}


def test_the_command_prints_the_table(model: Path, tmp_path: Path) -> None:
    directory = trained(model, tmp_path / "run", steps=3)
    result = run(app, ["gap", str(directory.path), "--groups", "8"])
    assert result.exit_code == 0 and "mean |Δlogp|" in result.output and "compute alike" in result.output


@pytest.mark.filterwarnings("default")  # vLLM's own imports emit warnings
def test_vllm_with_bfloat16_weights_beside_a_float32_trainer(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", tied=False)
    asked = config(tmp_path / "model", steps=3, engine={"kind": "vllm", "max_prompt_tokens": 24})
    mixed = asked.model.model_copy(update={"serve": "bfloat16"})
    directory = ran(asked.model_copy(update={"model": mixed}), tmp_path / "run")[1]
    found = Run(directory.path).gap()
    assert found.rounded and found.total.tokens > 0
    assert found.total.engine.size < 0.1
