"""Models of the hub: downloaded once, pinned to a commit, and refused early if they bring code or pickles.

The hub is the stand-in of tests/fixtures/hub.py, on loopback.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.errors import HubError
from offbeat.hub import find_model, hub_name, model_directory
from tests.fixtures.hub import HubStandIn, connected_to, serve_hub
from tests.fixtures.tiny_model import save_model

NAME = "tiny/adder"
run = CliRunner(env={"COLUMNS": "200"}).invoke
TOML = """
steps = 2
prompts_per_step = 4
group_size = 4
[model]
path = "tiny/adder"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
[sampling]
max_tokens = 5
[objective]
zero_variance_mask = false
[task]
name = "{task}"
scorers = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubStandIn]:
    with serve_hub() as hub, connected_to(hub, tmp_path / "cache"):
        yield hub


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(task=Path(__file__).parent / "run" / "digits_task.py"))
    return file


def test_a_run_with_a_hub_name_trains_and_keeps_the_commit_also_when_it_resumes(
    hub: HubStandIn, model: dict[str, bytes], toml: Path, tmp_path: Path
) -> None:
    commit, out = hub.push(NAME, model), tmp_path / "run"
    result = run(app, ["train", str(toml), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "step 2/2  reward" in result.output
    assert json.loads((out / "config.json").read_text())["model"]["revision"] == commit
    newer = hub.push(NAME, {**model, "README.json": b"{}"})
    hub.requests.clear()
    resumed = run(app, ["resume", str(out), "--steps", "3"])
    assert resumed.exit_code == 0 and "step 3/3  reward" in resumed.output, resumed.output
    assert hub.requests == [], "the pinned commit is in the cache"
    assert find_model(NAME).commit == newer != commit


def test_check_downloads_the_small_files_and_says_what_the_run_will_download(
    hub: HubStandIn, model: dict[str, bytes], toml: Path
) -> None:
    commit = hub.push(NAME, model)
    result = run(app, ["check", str(toml)])
    assert result.exit_code == 0, result.output
    size = len(model["model.safetensors"]) / 1e6
    assert f"model {NAME} of the hub at commit {commit[:12]}: {size:.1f} MB to download" in result.output
    assert hub.fetched("config.json") and not hub.fetched(".safetensors")


def test_a_moved_branch_does_not_move_a_pinned_commit(hub: HubStandIn, model: dict[str, bytes]) -> None:
    first = hub.push(NAME, model)
    second = hub.push(NAME, {**model, "generation_config.json": b'{"eos_token_id": 1}'})
    assert model_directory(NAME, first).name == first
    assert model_directory(NAME).name == second == model_directory(NAME, "main").name
    assert (model_directory(NAME, first) / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_only_the_files_that_transformers_needs_are_downloaded(hub: HubStandIn, model: dict[str, bytes]) -> None:
    extra = dict.fromkeys(["consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "README.md"], b"x")
    hub.push(NAME, {**model, **extra})
    found = {file.name for file in model_directory(NAME).iterdir()}
    assert found == set(model) and not hub.fetched(".bin")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modeling_own.py": b"print()"}, "brings code (modeling_own.py)"),
        ({"config.json": b'{"auto_map": {"AutoModel": "x.Y"}}'}, "auto_map in config.json"),
        ({"tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": "x.Y"}}'}, "auto_map in tokenizer_config.json"),
        ({"pytorch_model.bin": b"pickle", "model.safetensors": None}, "pytorch_model.bin would have to be unpickled"),
        ({"model.safetensors": None}, "there are no *.safetensors"),
        ({"config.json": None}, "has no config.json"),
    ],
)  # fmt: skip
def test_code_and_pickles_are_refused_before_any_weights_are_downloaded(
    hub: HubStandIn, model: dict[str, bytes], toml: Path, change: dict[str, bytes | None], words: str
) -> None:
    hub.push(NAME, {file: data for file, data in {**model, **change}.items() if data is not None})
    result = run(app, ["train", str(toml)])
    assert result.exit_code == 2 and words in result.output, result.output
    with pytest.raises(HubError, match=r"never runs|no weights|no config\.json"):
        model_directory(NAME)
    assert not hub.fetched(".safetensors") and not hub.fetched(".bin") and not hub.fetched(".py")


def test_a_download_that_breaks_off_is_an_error_and_continues_later(hub: HubStandIn, model: dict[str, bytes]) -> None:
    hub.push(NAME, model)
    hub.cut_after["model.safetensors"] = 1000
    with patch("time.sleep"), pytest.raises(HubError, match=r"failed .*run the command again"):
        model_directory(NAME)
    with pytest.raises(HubError), patch("time.sleep"):
        model_directory(NAME)
    hub.cut_after.clear()
    assert (model_directory(NAME) / "model.safetensors").read_bytes() == model["model.safetensors"]


def test_an_index_that_names_files_elsewhere_is_refused(hub: HubStandIn, model: dict[str, bytes]) -> None:
    index = {"weight_map": {"lm_head.weight": "../../../secret.safetensors"}}
    hub.push(NAME, {**model, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(HubError, match="not an index of weight files"):
        model_directory(NAME)


def test_a_part_that_the_index_names_and_the_model_lacks_is_named(hub: HubStandIn, model: dict[str, bytes]) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    hub.push(NAME, {**model, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(HubError, match=r"model-2\.safetensors .*no such file"):
        model_directory(NAME)


def test_an_unknown_name_or_revision_gets_a_sentence(hub: HubStandIn, model: dict[str, bytes], toml: Path) -> None:
    result = run(app, ["check", str(toml)])
    assert result.exit_code == 2 and "the hub has no model 'tiny/adder'" in result.output, result.output
    hub.push(NAME, model)
    result = run(app, ["check", str(toml), "--set", "model.revision=v9"])
    assert result.exit_code == 2 and "has no revision 'v9'" in result.output, result.output


def test_without_a_network_a_downloaded_model_works_and_another_gets_a_sentence(
    tmp_path: Path, model: dict[str, bytes]
) -> None:
    with serve_hub() as hub, connected_to(hub, tmp_path / "cache"):
        commit = hub.push(NAME, model)
        hub.push("tiny/other", model)
        directory = model_directory(NAME)
        find_model("tiny/other")  # its small files only
    with connected_to(hub, tmp_path / "cache"):  # the server is gone
        assert model_directory(NAME) == directory == model_directory(NAME, commit)
        for name in ("tiny/other", "tiny/third"):
            with pytest.raises(HubError, match=r"cannot be reached .* is not downloaded yet"):
                model_directory(name)


def test_a_directory_is_used_as_it_is_even_if_it_looks_like_a_hub_name(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs(NAME)
    save_model(Path(NAME))
    assert hub_name(NAME) is None and model_directory(NAME) == Path(NAME)
    assert hub_name(f"hf:{NAME}") == NAME and hub.requests == []


def test_a_revision_of_a_directory_is_refused(tmp_path: Path, toml: Path) -> None:
    save_model(tmp_path / "here")
    text = toml.read_text().replace('path = "tiny/adder"', f'path = "{tmp_path / "here"}"\nrevision = "main"')
    toml.write_text(text)
    result = run(app, ["check", str(toml)])
    assert result.exit_code == 2 and "model.revision = 'main' has no effect" in result.output


def test_eval_takes_the_same_names(hub: HubStandIn, model: dict[str, bytes]) -> None:
    hub.push(NAME, model)
    arguments = ["--task", "arithmetic", "--prompts", "2", "--samples", "2", "--max-tokens", "4"]
    for name in (NAME, f"hf:{NAME}"):
        result = run(app, ["eval", name, *arguments])
        assert result.exit_code == 0 and "pass@1" in result.output, result.output
