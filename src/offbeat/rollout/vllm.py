"""The vLLM engine: an embedded `AsyncLLM`, no HTTP server, exact version labels.

                 generate, logprobs                     load(version, weights)
                        │                                 │
   one vLLM request per completion                        │ full weights replace the version, adapters are added
                        │                                 │ beside the others (`vllm_versions.py`)
                        ▼                                 ▼
                 vLLM's engine core process and its workers (`vllm_worker.py`)

This file has the calls and the life of that process; the file above knows which weights compute a request. Only
`vllm*.py` import vLLM. `vllm_owner.py` ends processes whose owner is killed.
"""

import asyncio
import itertools
import multiprocessing
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError, EngineAsleep, EngineDead
from offbeat.rollout.engine import Request, Weights, all_of
from offbeat.rollout.parity import saved_shapes
from offbeat.rollout.vllm_settings import (
    VllmSettings,
    check_room,
    import_vllm,
    logprob_params,
    sampling_params,
    start_llm,
)
from offbeat.rollout.vllm_versions import Adapters, FullWeights
from offbeat.rollout.vllm_worker import GRACE
from offbeat.seeds import derive
from offbeat.types import Completion, Finish

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_T = TypeVar("_T")


class VllmEngine:
    """An `Engine` on a vLLM engine core process, which it owns.

    In a script, start it under `if __name__ == "__main__"`, because the process is spawned.

        engine = await VllmEngine.start(Path("SmolLM2-135M"), VllmSettings(max_model_len=512, max_num_seqs=64))
        [answers] = await engine.generate([Request("g7", prompt_ids, 8, Sampling(256, (2,)), seed=5)])
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        versions: FullWeights | Adapters,
        answer_within: float,
        sleeps: bool = False,
    ) -> None:
        self._llm = llm
        self._versions = versions
        self._sleeps = sleeps
        self._asleep = False
        self._answer_within = answer_within
        self._updating = asyncio.Lock()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_core())

    @classmethod
    async def start(
        cls,
        model_dir: Path,
        settings: VllmSettings,
        *,
        _extension: str = "offbeat.rollout.vllm_worker.WorkerPart",
    ) -> "VllmEngine":
        """Load a model directory, written by `save_pretrained`, as version 0. Code in it is never executed."""
        settings.check(model_dir)
        shapes, adapter = saved_shapes(model_dir), settings.adapter
        # In its own call: vLLM keeps tracebacks of the import, and what they refer to.
        await asyncio.to_thread(import_vllm, settings)
        llm = await asyncio.to_thread(start_llm, model_dir, settings, _extension)
        versions = (
            Adapters(llm, adapter, shapes, settings.slots) if adapter else FullWeights(llm, shapes, settings.on_update)
        )
        engine = cls(llm, versions, settings.answer_within, settings.sleeps)
        try:
            await engine._while_alive(llm.update_weight_version("0"))
            await engine._while_alive(llm.get_supported_tasks())  # cached by vLLM: later requests need not wait for it
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def version(self) -> int | None:
        return self._versions.version

    @property
    def holds_several(self) -> bool:
        return self._versions.holds_several

    @property
    def last_pause(self) -> float | None:
        """Seconds for which the last load paused generation; None before the first load, and with adapters."""
        return self._versions.last_pause

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        for request in requests:
            tokens = len(request.prompt_ids) + request.sampling.max_tokens
            check_room(f"prompt and max_tokens of {request.id}", tokens, self._llm.model_config.max_model_len)
        with self._in_call():
            jobs = (self._complete(request, index) for request in requests for index in range(request.size))
            done = iter(await self._while_alive(all_of(jobs)))
        return [tuple(itertools.islice(done, request.size)) for request in requests]

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See `Engine`. vLLM must generate one more token, so a sequence has at most `max_model_len` − 1 tokens."""
        for sequence in sequences:
            check_room("a sequence and one more token", len(sequence) + 1, self._llm.model_config.max_model_len)
        with self._in_call():
            return await self._while_alive(all_of(self._sequence_logprobs(sequence) for sequence in sequences))

    async def load(self, version: int, weights: Weights) -> None:
        async with self._updating:
            self._check_awake()
            # Weights may be half loaded after an error, so the engine cannot be used any more.
            with self._fatal(f"loading version {version}"):
                await self._while_alive(self._versions.load(version, weights))

    def serve(self) -> None:
        self._versions.serve()

    async def sleep(self) -> None:
        """See `Engine`. vLLM moves the weights to host memory and drops all keys and values."""
        async with self._updating:
            self._check_alive()
            if not self._sleeps:
                raise ConfigError(["this engine cannot sleep; start it with sleeps=True, on a GPU"])
            if self._asleep:
                return
            self._asleep = True  # no new call begins
            with self._fatal("the change to sleep"):
                await self._while_alive(self._idle.wait())
                await self._while_alive(self._llm.sleep(level=1, mode="wait"))

    async def wake(self) -> None:
        async with self._updating:
            self._check_alive()
            if not self._asleep:
                return
            with self._fatal("the wake"):
                await self._while_alive(self._llm.wake_up())
            self._versions.salt += 1  # no key or value from before the sleep may be found again
            self._asleep = False

    async def health(self) -> None:
        """See `Engine`. The engine core answers between two steps."""
        try:
            async with asyncio.timeout(self._answer_within):
                await self._while_alive(self._llm.get_weight_version())
        except TimeoutError:
            self._die(f"the engine core has not answered for {self._answer_within:g} s")
            raise EngineDead(self._death.result()) from None

    async def close(self) -> None:
        self._die("the engine was closed")
        self._watch.cancel()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # otherwise it reports the shutdown as an error
        await asyncio.to_thread(self._llm.shutdown, GRACE)
        multiprocessing.active_children()  # reaps the engine core
        # vLLM closes its sockets by a callback on this loop, but leaves their context to the garbage collector.
        await asyncio.sleep(0)
        self._llm.engine_core.resources.ctx.destroy(linger=0)

    async def _complete(self, request: Request, index: int) -> Completion:
        params = sampling_params(request.sampling, derive(request.seed, index))
        answer = await self._versions.run(request.prompt_ids.tolist(), params)
        outputs = [output.outputs[0] for output in answer.outputs]
        return Completion(
            id=request.completion_id(index),
            token_ids=np.array([token for output in outputs for token in output.token_ids], np.int32),
            behavior_logprobs=np.array([value for output in outputs for value in output.logprobs.logprobs], np.float32),
            versions=answer.versions,
            finish=Finish.STOP if outputs[-1].finish_reason == "stop" else Finish.LENGTH,
        )

    async def _sequence_logprobs(self, sequence: Sequence[int]) -> NDArray[np.float32]:
        answer = await self._versions.run(list(sequence), logprob_params(), loaded_last=True)
        values = answer.outputs[-1].prompt_logprobs
        assert values is not None
        return np.array(values.logprobs, np.float32)

    async def _while_alive(self, work: Awaitable[_T]) -> _T:
        """Return the result of `work`, or raise `EngineDead` as soon as the engine dies."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        task = asyncio.ensure_future(work)
        first: set[asyncio.Future[_T] | asyncio.Future[str]] = {task, self._death}
        try:
            self._check_alive()
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._check_alive()
            return task.result()
        except (EngineDeadError, EngineGenerateError) as error:
            self._die("the engine core has died")
            raise EngineDead(self._death.result()) from error
        finally:
            task.cancel()

    async def _watch_core(self) -> None:
        """Notice the death of the engine core. vLLM's own monitor ends generations, but not calls like a reload."""
        while not self._llm.errored:
            await asyncio.sleep(0.1)
        self._die("the engine core has died")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)

    @contextmanager
    def _fatal(self, what: str) -> Iterator[None]:
        """Declare the engine dead if the block fails or is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self._die(f"{what} was cancelled")
            raise
        except Exception as error:  # the boundary to vLLM: whatever failed, its state is unknown
            self._die(f"{what} failed: {error}")
            raise EngineDead(self._death.result()) from error

    @contextmanager
    def _in_call(self) -> Iterator[None]:
        """Count a call that computes, so that `sleep` waits for it."""
        self._check_awake()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _check_awake(self) -> None:
        self._check_alive()
        if self._asleep:
            raise EngineAsleep

    def _check_alive(self) -> None:
        if self._llm.errored:
            self._die("the engine core has died")
        if self._death.done():
            raise EngineDead(self._death.result())
