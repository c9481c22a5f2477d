"""Broken configurations, one for each kind of mistake, and what each message must contain: key, value, fix."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat.experience.log import ExperienceLog
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score

GOOD = """
[model]
path = "{places}/good"
[engine]
kind = "hf"
max_prompt_tokens = 32
[sampling]
max_tokens = 8
"""


@dataclass(frozen=True)
class Broken:
    """One broken configuration file."""

    name: str
    toml: str
    says: tuple[str, ...]
    """Fragments that one line of the message must contain."""

    def text(self, places: Path) -> str:
        """Return the whole file: the broken part, and the tables of a good file that it lacks."""
        tables = [f"[{table}" for table in GOOD.split("\n[")[1:]]
        rest = [table for table in tables if table.split("\n")[0] not in self.toml]
        return "\n".join([self.toml, *rest]).replace("{places}", str(places))


def cases() -> list[Broken]:
    """Read broken_configs.txt: for each case a name, the TOML, and after an arrow what the message must contain."""
    found = []
    for block in (Path(__file__).parent / "broken_configs.txt").read_text(encoding="utf-8").split("== ")[1:]:
        name, _, rest = block.partition("\n")
        toml, _, says = rest.partition("\n-> ")
        found.append(Broken(name, toml, tuple(says.strip().split(" | "))))
    return found


def make_places(root: Path) -> None:
    """Make a good model and broken ones, a log without log-probs, and a task file that fails."""
    _model(root / "good")
    (root / "empty").mkdir()
    (_model(root / "code") / "modeling_x.py").write_text("print('hello')")
    _model(root / "auto_map", auto_map={"AutoModelForCausalLM": "x.Y"})
    (_model(root / "pickled") / "model.safetensors").rename(root / "pickled" / "pytorch_model.bin")
    (_model(root / "weightless") / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (_model(root / "shardless") / "model.safetensors.index.json").write_text(json.dumps(index))
    (_model(root / "torn") / "model.safetensors").write_bytes(b"\x10")
    (_model(root / "garbled") / "config.json").write_text("{")
    (_model(root / "mute") / "tokenizer.json").unlink()
    (_model(root / "endless") / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (root / "failing.py").write_text("1 / 0")
    (root / "problems.jsonl").write_text('{"prompt": "Write f.", "tests": ["assert f() == 1"]}\n')
    answers = [
        Completion(f"g{g}/{i}", np.array([5], np.int32), UNKNOWN, source="human", score=Score(float(i)))
        for g in range(3)
        for i in range(2)
    ]
    with ExperienceLog.open(root / "empty-log"):
        pass
    with ExperienceLog.open(root / "log") as log:
        log.append(
            [
                Group(f"g{g}", Prompt("p", np.array([1], np.int32), "arithmetic"), tuple(answers[2 * g : 2 * g + 2]))
                for g in range(3)
            ]
        )


def _model(place: Path, **more: object) -> Path:
    """Write the files of a model that a check reads without loading it."""
    place.mkdir()
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "max_position_embeddings": 64,
    }
    (place / "config.json").write_text(json.dumps(sizes | more))
    (place / "tokenizer.json").write_text("{}")
    (place / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [16, 8], "data_offsets": [0, 512]}}).encode()
    weights = np.zeros(128, np.float32).tobytes()
    (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return place
