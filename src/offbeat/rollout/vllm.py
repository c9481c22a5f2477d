"""The vLLM engine: `AsyncLLM` embedded, no HTTP server, versions that can be trusted.

                 generate, score                        load(version, weights)
                        │                                 │ 1 weights into shared memory, generation goes on
   one vLLM request a completion,                         │ 2 pause: what runs is kept, or drained
   salted with the load it was                            │ 3 layerwise reload in the workers, new label
   submitted under                                        │ 4 what has no token yet starts over, newly salted
                        ▼                                 ▼ 5 resume
                 vLLM's engine core process and its workers (`vllm_worker.py`)

Why step 4: a request that waits in vLLM's queue, or is halfway through its prompt, while weights change would otherwise
find keys and values of the version before under its own salt. So the salt is exact: a completion with one version span
was computed by that version from its first prompt token to its last. Only what had begun to write goes on with the keys
and values it has, and says so with two spans.

Only `vllm*.py` import vLLM. Written to run on GPU as well, and not run there by us; vLLM's `nccl` transfer backends
would replace step 1 and the receiving half of step 3 (`WorkerPart.offbeat_receive`), and leave the rest as it is.
"""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import EngineDead
from offbeat.rollout.engine import Request, Weights
from offbeat.rollout.vllm_settings import environment, import_vllm, logprob_params, sampling_params, start_llm
from offbeat.rollout.vllm_worker import GRACE, SharedWeights, fitting, saved_shapes
from offbeat.seeds import derive
from offbeat.types import Completion, Finish, VersionSpan

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

OnUpdate = Literal["keep", "drain"]
_T = TypeVar("_T")


class VllmEngine:
    """An `Engine` over a vLLM engine core process, which it owns.

    From a script, guard the start with `if __name__ == "__main__"`: the process is spawned.

        engine = await VllmEngine.start(Path("SmolLM2-135M"), max_model_len=512, max_num_seqs=64)
        [answers] = await engine.generate([Request("g7", prompt_ids, 8, Sampling(256, (2,)), seed=5)])
    """

    def __init__(
        self, llm: "AsyncLLM", shapes: dict[str, list[int]], on_update: OnUpdate, answer_within: float
    ) -> None:
        """See `start`."""
        self._llm = llm
        self._shapes = shapes
        self._on_update = on_update
        self._answer_within = answer_within
        self._version: int | None = 0
        self._label = 0
        self._loads = 0
        self._last_pause: float | None = None
        self._updating = asyncio.Lock()
        self._numbers = itertools.count()
        self._writing: dict[str, bool] = {}
        """Requests that vLLM has, and whether their first token has come."""
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_core())

    @classmethod
    async def start(
        cls,
        model_dir: Path,
        *,
        dtype: str = "bfloat16",
        max_model_len: int,
        max_num_seqs: int,
        on_update: OnUpdate = "keep",
        threads: int = 1,
        kv_cache_gib: int = 1,
        gpu_memory_utilization: float = 0.9,
        answer_within: float = 60.0,
        _extension: str = "offbeat.rollout.vllm_worker.WorkerPart",
    ) -> "VllmEngine":
        """From a model directory, which counts as version 0; code that comes with it is not run.

        Args:
            model_dir: As written by `save_pretrained`, with safetensors.
            dtype: What is computed in, and what versions come in.
            max_model_len: Longest prompt with its completion.
            max_num_seqs: Completions written at the same time; more wait.
            on_update: At a load, `keep` what is being written and let it go on under the new version, or `drain` it.
            threads: On CPU, of the process that computes.
            kv_cache_gib: On CPU, memory for keys and values.
            gpu_memory_utilization: On GPU, share of the memory that vLLM takes.
            answer_within: Seconds after which an engine core that does not answer `health` counts as dead.
        """
        shapes = saved_shapes(model_dir)
        settings = {
            "model": str(model_dir),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
            "worker_extension_cls": _extension,
        }
        with environment(threads, kv_cache_gib):
            await asyncio.to_thread(import_vllm)  # by itself: vLLM keeps tracebacks of it, and what they refer to
            llm = await asyncio.to_thread(start_llm, settings)
        engine = cls(llm, shapes, on_update, answer_within)
        try:
            await engine._while_alive(llm.collective_rpc("offbeat_live_with", args=(os.getpid(),)))
            await engine._while_alive(llm.update_weight_version("0"))
            await engine._while_alive(llm.get_supported_tasks())  # remembered: requests are now made without waiting
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> int | None:
        """See `Engine`."""
        return self._version

    @property
    def last_pause(self) -> float | None:
        """Seconds for which the last load stopped generation; None before there was one."""
        return self._last_pause

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """See `Engine`."""
        for request in requests:
            self._check_room(len(request.prompt_ids) + request.sampling.max_tokens, request)
        jobs = (self._complete(request, index) for request in requests for index in range(request.size))
        done = iter(await self._while_alive(_all(jobs)))
        return [tuple(itertools.islice(done, request.size)) for request in requests]

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See `Engine`. vLLM cannot but generate one token more, so sequences end one short of `max_model_len`."""
        for sequence in sequences:
            self._check_room(len(sequence) + 1)
        return await self._while_alive(_all(self._score(sequence) for sequence in sequences))

    async def load(self, version: int, weights: Weights) -> None:
        """See `Engine`."""
        async with self._updating:
            self._check_alive()
            self._version = None
            try:
                with SharedWeights() as shared:
                    tied = bool(self._llm.model_config.hf_text_config.tie_word_embeddings)
                    await asyncio.to_thread(shared.write, fitting(weights, self._shapes, tied=tied))
                    await self._while_alive(self._update(version, shared))
            except asyncio.CancelledError:
                self._die(f"loading version {version} was cancelled")
                raise
            except Exception as error:  # half of it may be loaded: whatever happened, this engine is done
                self._die(f"loading version {version} failed: {error}")
                raise EngineDead(self._death.result()) from error
            self._version = version

    async def health(self) -> None:
        """See `Engine`. Asks the engine core, which answers between two steps."""
        try:
            async with asyncio.timeout(self._answer_within):
                await self._while_alive(self._llm.get_weight_version())
        except TimeoutError:
            self._die(f"the engine core has not answered for {self._answer_within:g} s")
            raise EngineDead(self._death.result()) from None

    async def close(self) -> None:
        """See `Engine`."""
        self._die("the engine was closed")
        self._watch.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it reports the end that is wanted here as an error
        await asyncio.to_thread(self._llm.shutdown, GRACE)
        multiprocessing.active_children()  # reaps the engine core
        await asyncio.sleep(
            0
        )  # vLLM closes its sockets by a call on this loop; their context it leaves to the collector
        self._llm.engine_core.resources.ctx.destroy(linger=0)

    async def _update(self, version: int, shared: SharedWeights) -> None:
        """Steps 2 to 5."""
        mode = "keep" if self._on_update == "keep" else "wait"
        # Not `pause_generation`, which sleeps another 20 ms while all stands still.
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        paused = time.monotonic()
        self._loads += 1
        asked_before = list(self._writing)
        await self._llm.collective_rpc("offbeat_receive", args=(shared.path, shared.table))
        await self._llm.update_weight_version(str(version))
        # A version loaded once more, or one before, may correct what is being served: nothing written so far is kept.
        keep = mode == "keep" and version > self._label
        again = [name for name in asked_before if not (keep and self._writing.get(name, False))]
        self._label = version
        await self._llm.abort(again)  # those that have ended meanwhile are passed over
        await self._llm.resume_generation()
        self._last_pause = time.monotonic() - paused

    async def _complete(self, request: Request, index: int) -> Completion:
        params = sampling_params(request.sampling, derive(request.seed, index))
        outputs = [output.outputs[0] for output in await self._run(request.prompt_ids.tolist(), params)]
        versions, ended = outputs[-1].weight_versions, outputs[-1].finish_reason
        assert versions is not None
        return Completion(
            id=request.completion_id(index),
            token_ids=np.array([token for output in outputs for token in output.token_ids], np.int32),
            behavior_logprobs=np.array([value for output in outputs for value in output.logprobs.logprobs], np.float32),
            versions=tuple(VersionSpan(int(span.version), span.start, span.end) for span in versions),
            finish=Finish.STOP if ended == "stop" else Finish.LENGTH,
        )

    async def _score(self, sequence: Sequence[int]) -> NDArray[np.float32]:
        *_, output = await self._run(list(sequence), logprob_params())
        assert output.prompt_logprobs is not None
        return np.array(output.prompt_logprobs.logprobs, np.float32)

    async def _run(self, prompt_ids: list[int], params: "SamplingParams") -> "list[RequestOutput]":
        """The pieces that vLLM answers with; started over as often as a load demands."""
        from vllm.inputs import tokens_input

        while True:
            name = str(next(self._numbers))
            prompt = tokens_input(prompt_ids, cache_salt=str(self._loads))
            self._writing[name] = False
            outputs: list[RequestOutput] = []
            try:
                async for output in self._llm.generate(prompt, params, name):
                    self._writing[name] = True
                    outputs.append(output)
            finally:
                del self._writing[name]
            if outputs[-1].outputs[0].finish_reason != "abort":
                return outputs

    async def _while_alive(self, work: Awaitable[_T]) -> _T:
        """The result of `work`, or `EngineDead` as soon as there is no engine to do it."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[_T] | asyncio.Future[str]] = {task, self._death}
        try:
            self._check_alive()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._check_alive()
            return task.result()
        except (EngineDeadError, EngineGenerateError) as error:
            self._die("the engine core has died")
            raise EngineDead(self._death.result()) from error
        finally:
            task.cancel()

    async def _watch_core(self) -> None:
        """vLLM's own watch ends what is being generated, not calls like a reload; so death is made known here."""
        while not self._llm.errored:
            await asyncio.sleep(0.1)
        self._die("the engine core has died")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    def _check_alive(self) -> None:
        if self._llm.errored:
            self._die("the engine core has died")
        if self._death.done():
            raise EngineDead(self._death.result())

    def _check_room(self, tokens: int, request: Request | None = None) -> None:
        longest = self._llm.model_config.max_model_len
        if tokens > longest:
            asked = f"prompt and max_tokens of {request.id}" if request else "a sequence to score, and one token more,"
            raise ValueError(f"{asked} make {tokens} tokens, and max_model_len is {longest}: raise it, or ask for less")


async def _all(jobs: Iterable[Coroutine[None, None, _T]]) -> list[_T]:
    """Their results, in order; where one fails, or the caller gives up, the others are given up as well."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
