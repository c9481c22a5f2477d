"""Check that wrong versions are detected: truncated, swapped and stale ones. As many right ones must pass.

python -m lab.torture.detect_versions            100 wrong versions, tiny model, float32: row
                                                 weights-rollout.3.detect; minutes
python -m lab.torture.detect_versions coarse     the hardest case, stale weights of SmolLM2 in vLLM with bf16 at
                                                 lr 1e-5: row weights-rollout.3.coarse; minutes
"""

import asyncio
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lab.figures import Figure, command_parser, report
from offbeat.errors import WeightLogError
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.parity import Prober, judge
from offbeat.weights.probe import Probe, Sequences, probe_sequences
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSIONS = 12
LR = 1e-5


def tiny(place: Path) -> Path:
    """Save an untrained model with two layers and return its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(place / "model")
    return place / "model"


def train(model: "PreTrainedModel", lr: float, seed: int = 0, length: int = 24) -> Iterator[None]:
    """Train with AdamW on a policy gradient with random tokens and advantages. Yield after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    rng = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(2, model.config.vocab_size, (4, length), generator=rng)
        advantages = torch.randn(4, 1, generator=rng)
        logprobs = model(ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (-advantages * logprobs).mean().backward()
        optimizer.step()
        yield


async def publish_versions(place: Path, directory: Path, lr: float) -> Sequences:
    """Write a weight log with one training step between two versions."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype="float32")
    sequences = probe_sequences([], model.config.vocab_size, seed=0)
    with WeightLog.open(place / "weights", anchor_every=4) as log:
        for version, _ in zip(range(VERSIONS), itertools.chain([None], train(model, lr)), strict=False):
            log.publish(version, model.state_dict().items(), Probe(sequences, _logprobs(model, sequences)))
    return sequences


def _logprobs(model: "PreTrainedModel", sequences: Sequences) -> list[list[float]]:
    """Compute the log-probs of the trainer in the simplest way."""
    with torch.no_grad():
        found = [model(torch.tensor([one])).logits[0, :-1].float().log_softmax(-1) for one in sequences]
    return [rows[range(len(one) - 1), one[1:]].tolist() for rows, one in zip(found, sequences, strict=True)]


def refuses(place: Path, version: int) -> bool:
    """Return True if a new reader refuses this version."""
    with Subscription.open(place, name="reader") as reader:
        try:
            reader.fetch(version)
        except WeightLogError:
            return True
    return False


def spoil_files(place: Path, version: int, how: str, rng: random.Random) -> None:
    """Truncate a file of the version, or replace it by that of another version."""
    files = sorted(path for path in place.rglob("*") if path.is_file() and f"{version:010}" in str(path))
    if any(path.suffix == ".safetensors" for path in files):
        files = [
            path for path in files if path.suffix != ".patch"
        ]  # a reader that starts from the anchor does not read it
    victim = rng.choice(files)
    if how == "truncated":
        os.truncate(victim, rng.randrange(victim.stat().st_size))
        return
    others = [
        path
        for path in sorted(place.rglob(f"*{victim.suffix}"))
        if path.is_file() and path.parent == victim.parent and path != victim and path.suffix == victim.suffix
    ]
    shutil.copyfile(rng.choice(others), victim)


async def served(place: Path, directory: Path, version: int, how: str, rng: random.Random) -> bool:
    """Return True if the probe detects an engine that serves the wrong weights. The right weights must pass."""
    with Subscription.open(place, name="engine") as reader:

        def of(number: int) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in reader.fetch(number).items()}

        calibration, before, probe = reader.probe(0), reader.probe(version - 1), reader.probe(version)
        assert calibration and before and probe
        engine = HfEngine.start(directory)
        prober = await Prober.calibrated(engine, calibration)
        await engine.load(version - 1, of(version - 1).items())
        assert (await prober.check(engine, before)).passed, "the probe failed for the right version"
        wrong = of(version - 1) if how == "stale" else of(version)
        if how == "swapped":
            pairs = [
                (a, b)
                for a, b in itertools.combinations(wrong, 2)
                if wrong[a].shape == wrong[b].shape and wrong[a].ndim == 2
            ]
            first, second = rng.choice(pairs)
            wrong[first], wrong[second] = wrong[second], wrong[first]
        await engine.load(version, wrong.items())
        detected = not (await prober.check(engine, probe)).passed
        await engine.load(version, of(version).items())
        assert (await prober.check(engine, probe)).passed, "the probe failed for the right version"
        return detected


async def detections(cases: int) -> Counter[str]:
    """Return how many wrong versions of each kind were detected."""
    detected: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        origin = Path(scratch) / "origin"
        directory = tiny(Path(scratch))
        await publish_versions(origin, directory, lr=1e-5)
        for case in range(cases):
            rng = random.Random(case)
            version = rng.randrange(1, VERSIONS)
            how = ("truncated", "swapped", "stale")[case % 3]
            if how == "truncated" or (how == "swapped" and case % 2):
                copy = Path(scratch) / "copy"
                shutil.copytree(origin / "weights", copy)
                assert not refuses(copy, version), "the right version was refused"
                spoil_files(copy, version, how, rng)
                detected[how] += refuses(copy, version)
                shutil.rmtree(copy)
            else:
                detected[how] += await served(origin / "weights", directory, version, how, rng)
    return detected


def exact(short: bool) -> bool:
    """Row weights-rollout.3.detect."""
    count = 20 if short else 100
    detected = asyncio.run(detections(count))
    total = detected.total()
    return report(
        short,
        Figure(
            "weights-rollout.3.detect",
            "truncated, swapped or stale versions detected, and right ones passed",
            f"{count} of {count}",
            f"{total} of {count}",
            "versions",
            total == count,
            count,
            ", ".join(f"{count} {how}" for how, count in sorted(detected.items()))
            + "; files truncated or swapped in the log, tensors swapped or stale in a transformers engine, AdamW steps "
            "at lr 1e-5, float32; every case also serves the right version, which always passed",
        ),
    )


async def stale_in_bf16(steps: int) -> tuple[int, int | None, float]:
    """Run vLLM in bf16 beside a trainer. Return the right loads that failed, the steps until stale ones were detected,
    and the rounding."""
    from transformers import AutoModelForCausalLM

    from lab.fixtures import smollm2
    from offbeat.rollout.vllm import VllmEngine
    from offbeat.rollout.vllm_settings import VllmSettings

    trainer = AutoModelForCausalLM.from_pretrained(str(smollm2.directory()), dtype="float32")
    serving = AutoModelForCausalLM.from_pretrained(str(smollm2.directory()), dtype="bfloat16")
    sequences = probe_sequences([list(range(100 + 7 * i, 124 + 7 * i)) for i in range(4)], 49_152, seed=0)
    engine = await VllmEngine.start(smollm2.directory(), VllmSettings(max_model_len=128, max_num_seqs=16))
    failed, detected = 0, None
    try:
        prober = await Prober.calibrated(engine, Probe(sequences, _logprobs(serving, sequences)))
        measured = np.concatenate(await engine.logprobs(sequences))  # a deaf engine keeps returning these
        deaf = replace(prober)
        for step, _ in zip(range(1, steps + 1), train(trainer, LR), strict=False):
            serving.load_state_dict(trainer.state_dict())
            probe = Probe(sequences, _logprobs(serving, sequences))
            stale = judge(deaf, probe.values, measured)
            await engine.load(step, serving.state_dict().items())
            right = await prober.check(engine, probe)
            failed += not right.passed
            if detected is None and not stale.passed:
                detected = step
            print(f"step {step}: loaded: {right}; stale: {stale}", flush=True)
    finally:
        await engine.close()
    return failed, detected, prober.rounding


def coarse(short: bool, steps: int = 20) -> bool:
    """Row weights-rollout.3.coarse: the probe if rounding is larger than the change of a step."""
    failed, detected, rounding = asyncio.run(stale_in_bf16(steps))
    return report(
        short,
        Figure(
            "weights-rollout.3.coarse",
            f"steps at lr {LR:g} until an engine that ignores loads is detected: vLLM in bf16, SmolLM2-135M",
            f"detected within {steps}, every right load passes",
            f"{'not' if detected is None else detected} detected, {failed} of {steps} right loads failed",
            "steps",
            detected is not None and not failed,
            steps,
            f"rounding between vLLM and transformers, both in bf16, is {rounding:.3f} a token; in these steps the "
            "policy moves by less than that; hashes detect damaged bytes at once in any dtype",
        ),
    )


if __name__ == "__main__":
    commands = {"exact": exact, "coarse": coarse}
    parser = command_parser(__doc__, short="20 wrong versions; record nothing")
    parser.add_argument("what", nargs="?", choices=commands, default="exact")
    chosen = parser.parse_args()
    sys.exit(not commands[chosen.what](chosen.short))
