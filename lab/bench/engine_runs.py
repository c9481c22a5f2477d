"""Runs of the vLLM engine against transformers, for `python -m lab.bench.engine` and the tests of the engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
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
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_full import OnUpdate
from offbeat.rollout.vllm_worker import WorkerPart
from offbeat.types import UNKNOWN, Completion
from offbeat.weights.probe import Probe, probe_sequences

VOCABULARY = 40
PROMPT = 80
"""Tokens of a prompt: two and a half blocks of the prefix cache."""


class Unrepaired(WorkerPart):
    """A worker that does not repair tied heads: the fault that a probe must detect."""

    def offbeat_repair_heads(self, model: torch.nn.Module) -> None:
        pass


class WithoutTwin(WorkerPart):
    """A worker that reloads the model itself while generation pauses, as on GPU."""

    def offbeat_prepare(self, path: str, table: str) -> None:
        pass


SHARDED = {"q_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "down_proj": 1, "embed_tokens": 0, "lm_head": 0}
"""Kinds of weights that tensor parallel splits, and along which axis."""


class MisSharded(WorkerPart):
    """A worker of a tensor parallel engine that splits one kind of weights wrongly in every second load.

    The second process then gets the first one's part. The kinds take turns.
    """

    rank: int
    offbeat_loads = 0

    def offbeat_weights(self, path: str, table: str) -> Iterator[tuple[str, Tensor]]:
        self.offbeat_loads += 1
        kind = list(SHARDED)[(self.offbeat_loads // 2 - 1) % len(SHARDED)]
        wrong = self.rank == 1 and self.offbeat_loads % 2 == 0
        for name, tensor in super().offbeat_weights(path, table):
            axis = SHARDED[kind]
            yield name, tensor.roll(tensor.shape[axis] // 2, axis) if wrong and f"{kind}.weight" in name else tensor


def perturb(model: LlamaForCausalLM, seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    """Move all weights a little and return a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def expected(model: LlamaForCausalLM, ids: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """Return the log-probs that transformers computes for the tokens after the first."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    values: NDArray[np.float32] = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return values


def probe_of(model: LlamaForCausalLM) -> Probe:
    """Return the probe that a trainer would publish with these weights."""
    sequences = probe_sequences([list(range(3, 30)), list(range(40, 10, -1))], VOCABULARY, seed=0)
    return Probe(sequences, [expected(model, one) for one in sequences])


def prompts(count: int, seed: int, length: int = PROMPT) -> list[list[int]]:
    """Return prompts of random tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (count, length)).tolist()  # type: ignore[no-any-return]


def span_faults(completion: Completion) -> list[str]:
    """Return what is wrong with the version spans of a completion."""
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
    """Return the largest |Δlogp| to transformers over the first `end` tokens of a completion."""
    assert completion.behavior_logprobs is not UNKNOWN
    values = expected(model, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 :]
    return float(np.abs(values - completion.behavior_logprobs)[:end].max())


@asynccontextmanager
async def engine_for(
    directory: Path,
    on_update: OnUpdate = "keep",
    worker_part: type[WorkerPart] = WorkerPart,
    *,
    tensor_parallel: int = 1,
    extra: Mapping[str, object] | None = None,
) -> AsyncIterator[VllmEngine]:
    """Start a float32 engine with one thread a process, with fewer slots than these runs ask for."""
    engine = await VllmEngine.start(
        directory,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        on_update=on_update,
        tensor_parallel=tensor_parallel,
        extra=extra,
        _extension=f"{worker_part.__module__}.{worker_part.__name__}",
    )
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class Rounds:
    """By round: the largest |Δlogp| to transformers over the probe before and after a sync, and whether it passed."""

    before: list[float]
    after: list[float]
    passed: list[bool]
    means: list[float]
    """The mean |Δlogp| after a sync."""


async def sync_rounds(engine: VllmEngine, model: LlamaForCausalLM, rounds: int) -> Rounds:
    """Perturb, compare, sync, compare. In the last three rounds the sync includes the head, tied or not."""
    found = Rounds([], [], [], [])
    prober = await Prober.calibrated(engine, probe_of(model))
    for number in range(1, rounds + 1):
        weights = perturb(model, seed=number)
        if number <= rounds - 3 and model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        probe = probe_of(model)
        found.before.append(await largest_gap(engine, probe))
        await engine.load(number, weights.items())
        found.after.append(await largest_gap(engine, probe))
        verdict = await prober.check(engine, probe)
        found.passed.append(verdict.passed)
        found.means.append(verdict.gap)
    return found


async def broken_loads(engine: VllmEngine, model: LlamaForCausalLM, kinds: Sequence[str]) -> dict[str, bool]:
    """Load right and wrong versions in turn into an engine with `MisSharded`; return which wrong ones were noticed."""
    prober = await Prober.calibrated(engine, probe_of(model))
    noticed = {}
    for number, kind in enumerate(kinds):
        for version, right in ((2 * number + 1, True), (2 * number + 2, False)):
            await engine.load(version, perturb(model, seed=version).items())
            passed = (await prober.check(engine, probe_of(model))).passed
            if right and not passed:
                raise AssertionError(f"version {version} is right, but its probe failed")
            noticed[kind] = not passed
    return noticed


async def largest_gap(engine: VllmEngine, probe: Probe) -> float:
    """Return the largest |Δlogp| on the sequences of a probe."""
    return float(np.abs(np.concatenate(await engine.logprobs(probe.sequences)) - probe.values).max())


@dataclass
class GenerationRun:
    """The completions of a run with loads during generation."""

    completions: list[tuple[list[int], Completion]]
    states: Mapping[int, Mapping[str, Tensor]]
    """The weights of every loaded version."""


async def load_while_generating(
    engine: VllmEngine, model: LlamaForCausalLM, loads: int, after: int = 0
) -> GenerationRun:
    """Load versions while groups of few prompts are requested without pause, more than the engine has slots."""
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
    return GenerationRun(seen, states)


@dataclass(frozen=True)
class Verdict:
    """Counts over the completions of `load_while_generating`."""

    faults: int
    unloaded: int
    """Tokens labeled with a version that was not loaded."""
    whole: int
    """Completions of one version."""
    spanning: int
    whole_gap: float
    """Largest |Δlogp| to transformers over all tokens of completions of one version."""
    first_gap: float
    """The same over the first spans of the other completions."""


def judge(run: GenerationRun, model: LlamaForCausalLM) -> Verdict:
    """Compare the completions with transformers, version by version."""
    faults = sum(bool(span_faults(completion)) for _, completion in run.completions)
    spans = [span for _, completion in run.completions for span in completion.versions]
    unloaded = sum(span.end - span.start for span in spans if span.version not in run.states)
    whole_gaps, first_gaps = [0.0], [0.0]
    for version, state in run.states.items():
        model.load_state_dict(state)
        for prompt, completion in run.completions:
            first = completion.versions[0]
            if first.version == version:
                gaps = whole_gaps if len(completion.versions) == 1 else first_gaps
                gaps.append(gap(model, prompt, completion, first.end))
    whole, spanning = len(whole_gaps) - 1, len(first_gaps) - 1
    return Verdict(faults, unloaded, whole, spanning, max(whole_gaps), max(first_gaps))
