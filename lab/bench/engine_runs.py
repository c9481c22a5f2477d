"""Runs of the vLLM engine against transformers: what `bench_engine.py` measures and the engine's tests assert."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.parity import Prober
from offbeat.rollout.vllm import OnUpdate, VllmEngine
from offbeat.rollout.vllm_worker import WorkerPart
from offbeat.types import UNKNOWN, Completion
from offbeat.weights.probe import Probe, probe_sequences

VOCABULARY = 40
PROMPT = 80
"""Tokens: two whole blocks of the prefix cache and a half."""


class Unrepaired(WorkerPart):
    """What a worker does without our repair of tied heads: the fault that a probe has to see."""

    def offbeat_repair_heads(self, model: torch.nn.Module) -> None:
        """Left out."""


def perturb(model: LlamaForCausalLM, seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    """Move all weights a little; gives a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def expected(model: LlamaForCausalLM, ids: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """Log-probs of the tokens after the first, by transformers."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    values: NDArray[np.float32] = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return values


def probe_of(model: LlamaForCausalLM) -> Probe:
    """What a trainer would publish with these weights."""
    sequences = probe_sequences([list(range(3, 30)), list(range(40, 10, -1))], VOCABULARY, seed=0)
    return Probe(sequences, [expected(model, one) for one in sequences])


def prompts(count: int, seed: int, length: int = PROMPT) -> list[list[int]]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (count, length)).tolist()  # type: ignore[no-any-return]


def span_faults(completion: Completion) -> list[str]:
    """What is wrong with its version spans."""
    spans = completion.versions
    faults = []
    if [span.start for span in spans] != [0, *(span.end for span in spans[:-1])]:
        faults.append("not contiguous")
    if not spans or spans[-1].end != len(completion.token_ids) or any(span.start >= span.end for span in spans):
        faults.append("not covering")
    if any(a.version > b.version for a, b in itertools.pairwise(spans)):
        faults.append("decreasing")
    return faults


def gap(model: LlamaForCausalLM, prompt: Sequence[int], completion: Completion, end: int | None = None) -> float:
    """Largest |Δlogp| between a completion's first `end` tokens and transformers."""
    assert completion.behavior_logprobs is not UNKNOWN
    values = expected(model, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 :]
    return float(np.abs(values - completion.behavior_logprobs)[:end].max())


@asynccontextmanager
async def engine_for(
    directory: Path, on_update: OnUpdate = "keep", worker_part: type[WorkerPart] = WorkerPart
) -> AsyncIterator[VllmEngine]:
    """A float32 engine on one thread, with fewer places than the runs here ask for."""
    name = f"{worker_part.__module__}.{worker_part.__name__}"
    engine = await VllmEngine.start(
        directory, dtype="float32", max_model_len=256, max_num_seqs=8, on_update=on_update, _extension=name
    )
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class Rounds:
    """Largest |Δlogp| between engine and transformers over the probe, and whether the probe passed."""

    before: list[float]
    after: list[float]
    passed: list[bool]


async def sync_rounds(engine: VllmEngine, model: LlamaForCausalLM, rounds: int) -> Rounds:
    """Perturb, compare, sync, compare; the last three rounds bring the head along, tied or not."""
    found = Rounds([], [], [])
    prober = await Prober.calibrated(engine, probe_of(model))
    for number in range(1, rounds + 1):
        weights = perturb(model, seed=number)
        if number <= rounds - 3 and model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        probe = probe_of(model)
        found.before.append(await widest(engine, probe))
        await engine.load(number, weights.items())
        found.after.append(await widest(engine, probe))
        found.passed.append((await prober.check(engine, probe)).passed)
    return found


async def widest(engine: VllmEngine, probe: Probe) -> float:
    """Largest |Δlogp| on a probe's sequences."""
    return float(np.abs(np.concatenate(await engine.logprobs(probe.sequences)) - probe.values).max())


@dataclass
class Watched:
    """What a run of loads during generation gave."""

    completions: list[tuple[list[int], Completion]]
    states: Mapping[int, Mapping[str, Tensor]]
    """The weights of every version loaded."""


async def load_while_generating(engine: VllmEngine, model: LlamaForCausalLM, loads: int, after: int = 0) -> Watched:
    """Groups are asked for without pause, more than there are places, over few prompts; meanwhile versions come."""
    states = {after: {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    seen: list[tuple[list[int], Completion]] = []
    stop = asyncio.Event()
    repeated = prompts(3, seed=7)

    async def ask(stream: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            prompt = repeated[(stream + number) % len(repeated)]
            request = Request(f"{stream}-{number}", prompt, 4, Sampling(60, (1,)), seed=1000 * stream + number)
            [group] = await engine.generate([request])
            seen.extend((prompt, completion) for completion in group)

    streams = [asyncio.create_task(ask(stream)) for stream in range(4)]
    for version in range(after + 1, after + loads + 1):
        await asyncio.sleep(0.2 + 0.2 * (version % 3))
        states[version] = perturb(model, seed=version)
        await engine.load(version, states[version].items())
    stop.set()
    await asyncio.gather(*streams)
    return Watched(seen, states)


@dataclass(frozen=True)
class Judged:
    """Counts over the completions of `load_while_generating`."""

    faults: int
    unloaded: int
    """Tokens under a version that was not loaded."""
    whole: int
    """Completions of one version."""
    spanning: int
    whole_gap: float
    """Largest |Δlogp| of any token of a completion of one version, to transformers at that version."""
    first_gap: float
    """The same over the first spans of the others."""


def judge(watched: Watched, model: LlamaForCausalLM) -> Judged:
    """Against transformers, version by version."""
    faults = sum(bool(span_faults(completion)) for _, completion in watched.completions)
    spans = [span for _, completion in watched.completions for span in completion.versions]
    unloaded = sum(span.end - span.start for span in spans if span.version not in watched.states)
    whole_gaps, first_gaps = [0.0], [0.0]
    for version, state in watched.states.items():
        model.load_state_dict(state)
        for prompt, completion in watched.completions:
            first = completion.versions[0]
            if first.version == version:
                gaps = whole_gaps if len(completion.versions) == 1 else first_gaps
                gaps.append(gap(model, prompt, completion, first.end))
    whole, spanning = len(whole_gaps) - 1, len(first_gaps) - 1
    return Judged(faults, unloaded, whole, spanning, max(whole_gaps), max(first_gaps))
