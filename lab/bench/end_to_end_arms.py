"""The arms of `python -m lab.bench.end_to_end` that are ours: a run by three cadences, and the bare engine.

Each function is the work of one process, which takes turns with the others (`tests/fixtures/gates.py`). Peers are in
`end_to_end_peers.py`.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from lab.bench.training_arms import DTYPE, DTYPE_NAME, Shape, our_step
from lab.fixtures import smollm2
from offbeat.run.journal import Phase
from offbeat.seeds import derive
from offbeat.types import Json
from tests.fixtures.forced_lengths import lottery, prompts
from tests.fixtures.gates import Turns

if TYPE_CHECKING:
    from offbeat.rollout.engine import Request
    from offbeat.rollout.vllm import VllmEngine

PROMPTS: Final = 512
"""Different prompts, of which each step takes the next."""
LONG: Final = 1e6
"""Seconds. A process that is stopped between its turns must not count as lost."""
TOKENS_TOGETHER: Final = 8192 // DTYPE.itemsize
"""Tokens of a micro-batch, for every arm: the default of our trainer, or half of it in float32, for as many bytes."""
PERIOD: Final = 10
AHEAD: Final = 2
"""Batches that workers of the concurrent run may be ahead of a publish, so that they need not wait for it."""

PHASES: Final = {
    "generation": (Phase.GROUPS,),
    "training": (Phase.TRAINING,),
    "sync": (Phase.PUBLISHING, Phase.LOADING),
}


@dataclass(frozen=True)
class Job:
    """What every arm does in a step."""

    prompt: int
    completion: int
    groups: int
    size: int

    @classmethod
    def parse(cls, text: str) -> "Job":
        """Read `48+32x8x8`: tokens of prompt and completion, prompts, completions of each."""
        lengths, groups, size = text.split("x")
        prompt, completion = lengths.split("+")
        return cls(int(prompt), int(completion), int(groups), int(size))

    def __str__(self) -> str:
        return f"{self.lengths}x{self.groups}x{self.size}"

    @property
    def lengths(self) -> str:
        return f"{self.prompt}+{self.completion}"

    @property
    def tokens(self) -> int:
        """Generated tokens of a step."""
        return self.groups * self.size * self.completion

    @property
    def shared_tokens(self) -> int:
        """Tokens of a batch in which each prompt stands once, before all its completions."""
        return self.groups * (self.prompt + self.size * self.completion)

    @property
    def flops(self) -> float:
        """Operations of the matrix products of training on one batch, prompts computed once."""
        return Shape(self.prompt, self.completion, self.size, self.groups, self.groups).flops(shared=True)

    def rows_together(self, tokens: int) -> int:
        """Return how many completions with their prompts fit in so many tokens, as a divisor of the batch.

        >>> Job.parse("48+32x8x8").rows_together(4096)
        32
        """
        rows = self.groups * self.size
        return max(n for n in range(1, rows + 1) if rows % n == 0 and n * (self.prompt + self.completion) <= tokens)

    def texts(self) -> list[str]:
        from transformers import AutoTokenizer

        return prompts(AutoTokenizer.from_pretrained(str(smollm2.directory())), self.prompt, PROMPTS)

    def check(self, lengths: Mapping[str, list[int]]) -> None:
        """Raise if a prompt or a completion has another length than the benchmark says."""
        expected = {"prompt": {self.prompt}, "completion": {self.completion}}
        if wrong := {name: sorted(set(found)) for name, found in lengths.items() if set(found) != expected[name]}:
            raise AssertionError(f"lengths are forced to {self.lengths}, but there are {wrong}")


def offbeat_settings(job: Job, *, every: int, concurrent: bool) -> dict[str, Any]:
    """Return the settings of a run with vLLM on two cores. In a concurrent run each half has one of them."""
    return {
        "steps": 1_000_000,
        "prompts_per_step": job.groups,
        "group_size": job.size,
        "model": {"compute": DTYPE_NAME},
        "objective": {"preset": "rec-oneside-nois"},
        "sampling": {"max_tokens": job.completion, "ignore_eos": True},
        "engine": {"kind": "vllm", "max_prompt_tokens": job.prompt, "threads": 1 if concurrent else 2},
        "workers": {"count": 1, "groups_at_once": job.groups, "lease_seconds": LONG},
        "trainer": {"save_every": 1_000_000, "token_budget": min(TOKENS_TOGETHER, job.shared_tokens)},
        "sync": {"every": every},
        "evaluation": {"every": 0},
        "run": {"silence": LONG, "patience": LONG}
        | ({"mode": "concurrent", "max_lag": every - 1 + AHEAD} if concurrent else {}),
    }


def offbeat_run(turns: Turns, job: Job, *, every: int, concurrent: bool = False) -> None:
    """Run `offbeat.train`, with a callback that blocks between turns.

    A step is the time between two `step` events: publish and load if due, generation, scoring, training.
    """
    import offbeat

    def between_steps(event: Mapping[str, Json]) -> str | None:
        if event["kind"] != "step":
            return None
        metrics, groups = cast("dict[str, float]", event["metrics"]), event["groups"]
        if metrics["completion_length"] != job.completion or groups != job.groups:
            raise AssertionError(f"a step on {groups} groups of {metrics['completion_length']} tokens, not {job}")
        seconds, lags = cast("dict[str, float]", event["seconds"]), cast("list[int]", event["lags"])
        spent = {name: sum(seconds.get(phase, 0.0) for phase in phases) for name, phases in PHASES.items()}
        more = turns.step_done(spent, {"lag": sum(lags) / len(lags)})
        return None if more else "the benchmark is over"

    rows = [{"prompt": text} for text in job.texts()]
    settings = offbeat_settings(job, every=every, concurrent=concurrent)
    with tempfile.TemporaryDirectory(prefix="offbeat-lab-", ignore_cleanup_errors=True) as place:
        offbeat.train(
            str(smollm2.directory()), lottery, rows, out=Path(place) / "run", progress=False,
            callbacks=[between_steps], **settings,
        )  # fmt: skip


def bare_engine(turns: Turns, job: Job) -> None:
    """Generate with `AsyncLLM` alone, then measure the rates of matrix products and of copies."""
    asyncio.run(_bare_engine(turns, job))


async def generate_bare(engine: "VllmEngine", requests: "Sequence[Request]") -> int:
    """Generate with `AsyncLLM.generate` alone, and return how many tokens."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def one(request: "Request", index: int) -> int:
        params = SamplingParams(
            n=1,
            seed=derive(request.seed, index),
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            stop_token_ids=list(request.sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"bare {request.id}")
        count = 0
        async for output in engine._llm.generate(prompt, params, f"bare {request.completion_id(index)}"):
            count = len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(request, i) for request in requests for i in range(request.size))))


async def _bare_engine(turns: Turns, job: Job) -> None:
    from transformers import AutoTokenizer

    from lab.bench.step_times import matmul_rate
    from offbeat.rollout.engine import Request, Sampling
    from offbeat.rollout.vllm import VllmEngine
    from offbeat.rollout.vllm_settings import VllmSettings

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.directory()))
    token_ids = [tokenizer.encode(text) for text in job.texts()]
    longest, at_once = job.prompt + job.completion, job.groups * job.size
    settings = VllmSettings(dtype=DTYPE_NAME, max_model_len=longest, max_num_seqs=at_once, threads=2)
    engine = await VllmEngine.start(smollm2.directory(), settings)
    try:
        more, step, spent = True, 0, 0.0
        while more:
            chosen = [(step * job.groups + i) % PROMPTS for i in range(job.groups)]
            sampling = Sampling(job.completion, ())
            requests = [
                Request(f"{step}-{i}", token_ids[i], job.size, sampling, seed=step * PROMPTS + i) for i in chosen
            ]
            began = time.perf_counter()
            tokens = await generate_bare(engine, requests)
            spent += time.perf_counter() - began
            if tokens != job.tokens:
                raise AssertionError(f"the bare engine wrote {tokens} tokens instead of {job.tokens}")
            step += 1
            more = turns.step_done({"generation": spent}, {"flops": matmul_rate(), "copy": copy_rate()})
    finally:
        await engine.close()


def training_half(turns: Turns, job: Job) -> None:
    """Train on random completions, with everything that a step of our trainer does, and generate nothing."""
    from offbeat.trainer.allocator import keep_freed_memory

    keep_freed_memory()  # as in a run on CPU
    row = job.prompt + job.size * job.completion
    together = min(job.groups, max(1, TOKENS_TOGETHER // row))
    step = our_step(Shape(job.prompt, job.completion, job.size, job.groups, together), shared=True)
    more, spent = True, 0.0
    while more:
        began = time.perf_counter()
        step()
        spent += time.perf_counter() - began
        more = turns.step_done({"training": spent})


def copy_rate() -> float:
    """Return the bytes a second that a large copy reads and writes, the median of nine."""
    import torch

    source, target = torch.ones(64 << 20, dtype=torch.float32), torch.empty(64 << 20, dtype=torch.float32)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * 4 * (64 << 20) / median(times)


OURS: Final[dict[str, Callable[[Turns, Job], None]]] = {
    "bare": bare_engine,
    "v1": partial(offbeat_run, every=1),
    "v10": partial(offbeat_run, every=PERIOD),
    "concurrent": partial(offbeat_run, every=PERIOD, concurrent=True),
    "half": training_half,
}
ENGINES: Final = {
    "v1": "offbeat at v = 1, generating with vLLM",
    "v10": "offbeat at v = 10, generating with vLLM",
    "concurrent": "offbeat at v = 10 in concurrent mode, generating with vLLM",
}
"""What generates in each of our arms, for the text of a row."""
