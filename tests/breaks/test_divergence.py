"""Divergence is contained: what a step destroyed is neither saved nor published, and the run can continue."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

VOCABULARY = ["<pad>", "<end>", *"0123456789+="]
TASK = """
import dataclasses
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.rewards import Reward

def short(text: str, columns: object) -> float:
    return float(len(text) % 2 == 0)

task = dataclasses.replace(arithmetic(), rewards=(Reward(short),))
"""
SETTINGS = """
steps = {steps}
prompts_per_step = 6
group_size = 6
[model]
path = "{model}"
compute = "{dtype}"
serve = "{dtype}"
[engine]
kind = "hf"
max_prompt_tokens = 24
[sampling]
max_tokens = 5
[optimizer]
learning_rate = {rate}
warmup_steps = {warmup}
[objective]
preset = "rec-oneside-nois"
[trainer]
save_every = 1
[task]
name = "{task}"
scorers = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model whose policy is far from uniform, so that losing it shows."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.4, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    characters = Tokenizer(WordLevel({one: n for n, one in enumerate(VOCABULARY)}, unk_token="<pad>"))
    characters.pre_tokenizer = Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>").save_pretrained(place)
    return place


def offbeat(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, env=dict(os.environ))


def events_of(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "run" / "events.jsonl").read_text().splitlines()]


def largest(folder: Path) -> float:
    """The largest size of a saved value; NaN if one is NaN."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if not name.startswith("rng/")]  # noqa: SIM118
            found += [float(tensors.get_tensor(name).double().abs().max()) for name in names]
    return math.nan if any(math.isnan(one) for one in found) else max(found)


def diverged(place: Path, model: Path, *, dtype: str = "float32", rate: float, warmup: int = 0) -> str:
    """Train with settings that diverge; return what the command printed."""
    (place / "task.py").write_text(TASK)
    made = SETTINGS.format(steps=6, model=model, dtype=dtype, rate=rate, warmup=warmup, task=place / "task.py")
    (place / "run.toml").write_text(made)
    result = offbeat(place, "train", "run.toml", "--out", "run")
    assert result.returncode != 0, f"a run that diverges ends as if nothing had happened: {result.stdout[-500:]}"
    return result.stdout + result.stderr


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learning_rate_of_a_million_ends_with_a_sentence_and_a_usable_checkpoint(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    said = diverged(tmp_path, model, dtype=dtype, rate=1e6)
    assert "diverged" in said and "1e+06" in said
    assert any(event["kind"] == "alarm" and event["action"] == "stop" for event in events_of(tmp_path))
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert folders and all(largest(folder) < 100 for folder in folders)
    command = re.search(r"offbeat (resume run --from-step \d+ --set optimizer\.learning_rate=\S+)", said)
    assert command, said
    before = len(events_of(tmp_path))
    again = offbeat(tmp_path, *command[1].split())
    assert again.returncode == 0, again.stderr
    steps = [event["step"] for event in events_of(tmp_path)[before:] if event["kind"] == "step"]
    assert steps == list(range(1, 7))
    [changed] = [event for event in events_of(tmp_path) if event["kind"] == "inputs changed"]
    assert any("optimizer.learning_rate" in what for what in changed["what"])


@pytest.mark.engine
def test_what_a_diverged_step_made_is_not_published(model: Path, tmp_path: Path) -> None:
    diverged(tmp_path, model, rate=1e6)
    published = [event["version"] for event in events_of(tmp_path) if event["kind"] == "published"]
    assert published == [0]
