"""Is an exported adapter the policy that the trainer had? In plain peft and transformers, and in vLLM as it comes.

    python -m lab.lora.exports    3 minutes; row lora.6

A run of the command line trains an adapter of SmolLM2-135M for three steps with the transformers engine in float32, and
`offbeat export` writes it as a directory of peft and, with `--merge`, as a whole model. Both are loaded without
offbeat, and their log-probs of the checkpoint's probe are compared with those of the trainer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lab.figures import Figure, command_parser, record
from lab.fixtures import smollm2
from offbeat.rollout.vllm_settings import Surroundings, environment
from offbeat.trainer.export import PROBE, find_checkpoint
from offbeat.weights.probe import Probe
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import scratch

GOAL: Final = 1e-4
SETTINGS: Final = """
steps = 3
prompts_per_step = 2
group_size = 4
adapter.rank = 8
optimizer.learning_rate = 1e-3
model.compute = "float32"
model.serve = "float32"
engine.kind = "hf"
engine.max_prompt_tokens = 64
sampling.max_tokens = 16
evaluation.every = 0
trainer.token_budget = 1024
"""
TASK: Final = """
examples = [{"prompt": f"Count to {number}:"} for number in range(3, 40)]

def reward(text, columns):
    return len(text) % 7 / 7  # answers differ in length, so every group moves the policy
"""
Values = NDArray[np.float32]


def offbeat(*words: str) -> None:
    """Run the command line; raise if it fails."""
    done = subprocess.run([OFFBEAT, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"offbeat {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def in_transformers(model: str, adapter: str, sequences: Sequence[Sequence[int]]) -> Values:
    """Return log-probs by plain transformers, with plain peft if there is an adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter).eval()
    found = []
    for ids in map(torch.tensor, sequences):
        with torch.inference_mode():
            logprobs_TV = loaded(ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(logprobs_TV.gather(1, ids[1:, None])[:, 0].numpy())
    return np.concatenate(found)


def in_vllm(model: str, adapter: str, sequences: Sequence[Sequence[int]]) -> Values:
    """Return log-probs by vLLM, which reads the adapter's directory itself."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    served: dict[str, object] = {}
    if adapter:
        targets = json.loads(Path(adapter, "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
        served = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
    served |= {"max_model_len": 256, "enforce_eager": True, "enable_prefix_caching": False}
    with environment(Surroundings()):  # one thread, and a small cache
        llm = LLM(model, dtype="float32", gpu_memory_utilization=0.3, **served)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    request = LoRARequest("exported", 1, adapter) if adapter else None
    outputs = llm.generate([{"prompt_token_ids": [*ids]} for ids in sequences], asked, lora_request=request)
    llm.llm_engine.engine_core.shutdown()
    return np.array(
        [
            place[token].logprob
            for output, ids in zip(outputs, sequences, strict=True)
            for token, place in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ],
        np.float32,
    )


LOADERS: Final = {"transformers": in_transformers, "vllm": in_vllm}


def loaded(how: str, model: Path, adapter: Path | None, sequences: Path) -> Values:
    """Load a policy in a process of its own and return its log-probs."""
    words = [how, str(model), str(adapter or ""), str(sequences)]
    done = subprocess.run([sys.executable, "-m", "lab.lora.exports", "--load", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return np.array(json.loads(done.stdout.splitlines()[-1]), np.float32)


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("--load", nargs=4, metavar="WORD", help="internal: print the log-probs of one loaded policy")
    if words := parser.parse_args().load:
        how, model, adapter, sequences = words
        print(json.dumps(LOADERS[how](model, adapter, json.loads(Path(sequences).read_text())).tolist()), flush=True)
        os._exit(0)  # at an ordinary exit, threads of vLLM may abort the process
    base = smollm2.directory()
    with scratch() as place:
        (place / "task.py").write_text(TASK, encoding="utf-8")
        settings = f'model.path = "{base}"\ntask.name = "{place / "task.py"}"\n{SETTINGS}'
        (place / "run.toml").write_text(settings, encoding="utf-8")
        offbeat("train", str(place / "run.toml"), "--out", str(place / "run"))
        offbeat("export", str(place / "run"), str(place / "adapter"))
        offbeat("export", str(place / "run"), str(place / "merged"), "--merge", "--dtype", "float32")
        manifest = json.loads((find_checkpoint(place / "run") / "manifest.json").read_text(encoding="utf-8"))
        probe = Probe.from_json(manifest["extras"][PROBE])
        (place / "sequences.json").write_text(json.dumps([[*map(int, one)] for one in probe.sequences]))
        gaps = {
            f"{what} in {how}": float(
                np.abs(loaded(how, model, adapter, place / "sequences.json") - probe.values).max()
            )
            for how in LOADERS
            for what, model, adapter in (("adapter", base, place / "adapter"), ("merged", place / "merged", None))
        }
        before = {how: loaded(how, base, None, place / "sequences.json") for how in LOADERS}
        moved = float(np.abs(before["transformers"] - probe.values).max())
        rounding = float(np.abs(before["transformers"] - before["vllm"]).max())
    worst = max(gaps.values())
    return record(
        Figure(
            "lora.6",
            "largest |Δlogp| of an exported policy to the trainer's: a directory of peft and merged weights, in plain "
            "peft and transformers and in vLLM, float32, SmolLM2-135M",
            f"≤ {GOAL:g}",
            float(f"{worst:.2g}"),
            "nats",
            worst <= GOAL < moved,
            len(gaps) * len(probe.values),
            f"{'; '.join(f'{name} {gap:.2g}' for name, gap in gaps.items())}; the base without it {moved:.2g}. "
            f"Rounding in float32: the base alone differs by {rounding:.2g} between both libraries, at tokens of "
            f"{probe.values.min():.0f} nats",
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
