"""Every command refuses the same model directories, in one sentence, before a library opens a file."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

import offbeat
from offbeat.cli.main import app
from offbeat.errors import ModelUnreadable
from offbeat.hub import model_directory
from offbeat.preflight.forecast import ModelFiles
from offbeat.rollout.hf import HfEngine
from offbeat.tasks.tokenizer import read_tokenizer
from tests.fixtures.tiny_model import save_model


def edit(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | entries))


def pickle_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (lambda model: (model / "modeling_own.py").write_text("1 / 0"), "it brings code (modeling_own.py)"),
    "auto_map": (lambda model: edit(model / "config.json", auto_map={"AutoModel": "x.Y"}), "auto_map in config.json"),
    "tokenizer code": (
        lambda model: edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": "x.Y"}),
        "auto_map in tokenizer_config.json",
    ),
    "pickled": (pickle_weights, "pytorch_model.bin would have to be unpickled"),
    "adapter": (lambda model: edit(model / "adapter_config.json", base_model_name_or_path="other"), "an adapter"),
    "weightless": (lambda model: (model / "model.safetensors").unlink(), "there are no weights"),
    "cut": (cut_weights, "its header says"),
    "garbled": (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
    "shardless": (
        lambda model: edit(model / "model.safetensors.index.json", weight_map={"a": "model-2.safetensors"}),
        "model-2.safetensors is missing",
    ),
}


@pytest.fixture(params=BAD)
def bad_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    model = tmp_path / "model"
    model.mkdir()
    save_model(model)
    spoil, words = BAD[request.param]
    spoil(model)
    return model, words


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)


def test_every_command_refuses_it_in_one_sentence(bad_model: tuple[Path, str], tmp_path: Path) -> None:
    model, words = bad_model
    (tmp_path / "run.toml").write_text(
        f'steps = 1\n[model]\npath = "{model}"\n[engine]\nkind = "hf"\n[evaluation]\nhold_out = 0.0\n'
    )
    commands = {
        "train": ("train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")),
        "check": ("check", str(tmp_path / "run.toml")),
        "eval": ("eval", str(model), "--task", "arithmetic"),
        "worker": ("worker", str(tmp_path / "run.toml")),
    }
    for name, command in commands.items():
        result = run(*command)
        assert result.exit_code in (1, 2) and isinstance(result.exception, SystemExit), (name, result.exception)
        assert words in " ".join(result.output.split()), (name, result.output)
    assert not (tmp_path / "run").exists()
    for call in (model_directory, offbeat.evaluate):
        with pytest.raises(ModelUnreadable) as caught:
            call(str(model), *(["arithmetic"] if call is offbeat.evaluate else []))
        assert words in str(caught.value)
    assert any(words in problem for problem in ModelFiles(model).problems())


def test_a_good_model_passes(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert model_directory(str(tmp_path)) == tmp_path and ModelFiles(tmp_path).problems() == []


def test_a_weight_that_is_missing_is_not_invented(tmp_path: Path) -> None:
    save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: one for name, one in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnreadable, match=rf"lack {lost} \(tensors missing: 1\)"):
        HfEngine.start(tmp_path)


def test_weights_of_another_shape_are_one_sentence(tmp_path: Path) -> None:
    save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.0" in name)
    save_file(weights | {name: np.zeros((3, 3), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnreadable, match="cannot be loaded") as caught:
        HfEngine.start(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}'])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, content: str) -> None:
    save_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnreadable, match="cannot be loaded") as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
