"""How a vLLM engine changes its version. Full weights are replaced, adapters are added beside each other.

Full weights, one version at a time:

    load(version, weights)    1 pause: keep running requests, or drain them
                              2 reload all weights in place, new version label
                              3 restart requests without a token, with the new salt
                              4 resume

Why step 3: weights may change while a request waits in vLLM's queue or is halfway through its prompt. Then it would
find keys and values of the previous version under its own salt, which is the load under which it was submitted. With
step 3 the salt is exact: a completion with one version span was computed by that version from its first prompt token to
its last. Only a request that already has tokens continues with its keys and values; its completion has two version
spans.

Adapters, several at once beside the base, which is version 0:

    load 7   ──► a free slot; version 6 generates, and 5 still ends what it began
    probe 7  ──► `logprobs` is computed with the version loaded last
    serve    ──► new requests get 7; 6 leaves its slot when its last request ends

Nothing is paused and no key or value is dropped. A completion has exactly one version, the one it began with.

vLLM identifies an adapter by a number, and its prefix cache by a name. Neither checks values: an adapter under a known
number is silently not loaded, and a known name finds keys and values of other weights. So every load has a new number
and a new name, even of the same version.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from offbeat.rollout.engine import Weights
from offbeat.rollout.parity import adapter_shapes, check_adapter, check_weights
from offbeat.rollout.vllm_worker import SharedWeights
from offbeat.types import VersionSpan
from offbeat.weights.adapter import AdapterSpec

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

OnUpdate = Literal["keep", "drain"]


@dataclass(frozen=True)
class Answer:
    """The outputs of a request, and the versions that computed its tokens."""

    outputs: "list[RequestOutput]"
    versions: tuple[VersionSpan, ...]


class FullWeights:
    """The version of an engine whose loads replace all weights."""

    holds_several: ClassVar = False

    def __init__(self, llm: "AsyncLLM", shapes: dict[str, list[int]], on_update: OnUpdate) -> None:
        self._llm, self._shapes, self._on_update = llm, shapes, on_update
        self.version: int | None = 0
        self.salt = 0
        """The number of loads. Keys and values are found again only under the same salt."""
        self.last_pause: float | None = None
        self._label = 0
        self._numbers = itertools.count()
        self._writing: dict[str, bool] = {}
        """vLLM's current requests, and whether their first token has arrived."""

    async def load(self, version: int, weights: Weights) -> None:
        """Replace the version. After an error the weights are unknown."""
        self.version = None
        with SharedWeights() as shared:
            tied = bool(self._llm.model_config.hf_text_config.tie_word_embeddings)
            await asyncio.to_thread(shared.write, check_weights(weights, self._shapes, tied=tied))
            await self._update(version, shared)
        self.version = version

    def serve(self) -> None:
        """Do nothing: every load does it."""

    async def _update(self, version: int, shared: SharedWeights) -> None:
        """Load the version and let it take over: steps 1 to 5."""
        mode = "keep" if self._on_update == "keep" else "wait"
        # `pause_generation` would sleep 20 ms more while everything waits.
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        paused = time.monotonic()
        self.salt += 1
        submitted_before = list(self._writing)
        await self._llm.collective_rpc("offbeat_reload", args=(shared.path, shared.table))
        await self._llm.update_weight_version(str(version))
        # The same or an earlier version may be loaded to correct wrong weights: then restart every request.
        keep = mode == "keep" and version > self._label
        restarted = [name for name in submitted_before if not (keep and self._writing.get(name, False))]
        self._label = version
        await self._llm.abort(restarted)  # vLLM ignores requests that have ended meanwhile
        await self._llm.resume_generation()
        self.last_pause = time.monotonic() - paused

    async def run(self, prompt_ids: list[int], params: "SamplingParams", *, loaded_last: bool = False) -> Answer:
        """Return the answer to a request. It is submitted again whenever a load aborts it."""
        from vllm.inputs import tokens_input

        while True:
            name = str(next(self._numbers))
            prompt = tokens_input(prompt_ids, cache_salt=str(self.salt))
            self._writing[name] = False
            outputs: list[RequestOutput] = []
            try:
                async for output in self._llm.generate(prompt, params, name):
                    self._writing[name] = True
                    outputs.append(output)
            finally:
                del self._writing[name]
            last = outputs[-1].outputs[0]
            if last.finish_reason != "abort":
                assert last.weight_versions is not None
                spans = (VersionSpan(int(span.version), span.start, span.end) for span in last.weight_versions)
                return Answer(outputs, tuple(spans))


SLOTS: Final = 4
"""Versions in use at the same time, unless asked otherwise: one generates, one is checked, two end what they began."""
_NOWHERE: Final = "/in/memory/only"
"""The path of every adapter. vLLM reads it only if it has lost the adapter, and then it must fail."""


@dataclass(eq=False)
class HeldVersion:
    """A version in the engine's memory."""

    version: int
    request: "LoRARequest | None" = None
    """What identifies it in vLLM; None for the base."""
    users: int = 0
    """Requests that are computed with it."""


class Adapters:
    """The versions that an engine holds.

    The engine calls `load` once at a time. `run` may be called at any time.
    """

    holds_several: ClassVar = True
    last_pause: ClassVar = None

    def __init__(self, llm: "AsyncLLM", spec: AdapterSpec, shapes: Mapping[str, list[int]], slots: int) -> None:
        self._llm, self._spec, self._slots = llm, spec, slots
        self._shapes = adapter_shapes(shapes, spec)
        self._serving = self._last = HeldVersion(0)
        self._in_slots: list[HeldVersion] = []
        self._released = asyncio.Event()
        self._loads = itertools.count(1)
        self._numbers = itertools.count()
        self.salt = 0

    @property
    def version(self) -> int:
        """The version that new requests are computed with."""
        return self._serving.version

    async def load(self, version: int, weights: Weights) -> None:
        """Add a version, in place of one that nobody uses. Wait for one if there is none."""
        from vllm.lora.request import LoRARequest

        self._last = self._serving  # a version that was loaded and not served is not needed any more
        while len(self._in_slots) - len(unused := self._unused()) >= self._slots:
            self._released.clear()
            await self._released.wait()
        number = next(self._loads)
        with SharedWeights() as shared:
            await asyncio.to_thread(shared.write, check_adapter(weights, self._shapes))
            removed = [one.request.lora_int_id for one in unused if one.request]
            arguments = (number, self._spec.peft_config(), shared.path, shared.table, removed)
            await self._llm.collective_rpc("offbeat_add_adapter", args=arguments)
        self._last = HeldVersion(version, LoRARequest(f"version {version}, load {number}", number, _NOWHERE))
        self._in_slots = [one for one in self._in_slots if one not in unused] + [self._last]

    def serve(self) -> None:
        """Compute new requests with the version loaded last."""
        self._serving = self._last
        self._released.set()

    async def run(self, prompt_ids: list[int], params: "SamplingParams", *, loaded_last: bool = False) -> Answer:
        """Return the answer to a request, computed with one version: the one served, or the one loaded last."""
        from vllm.inputs import tokens_input

        name = str(next(self._numbers))
        prompt = tokens_input(prompt_ids, cache_salt=str(self.salt))
        with self._using(self._last if loaded_last else self._serving) as held:
            outputs = [one async for one in self._llm.generate(prompt, params, name, lora_request=held.request)]
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return Answer(outputs, (VersionSpan(held.version, 0, tokens),))

    def _unused(self) -> list[HeldVersion]:
        return [one for one in self._in_slots if not one.users and one not in (self._serving, self._last)]

    @contextmanager
    def _using(self, held: HeldVersion) -> Iterator[HeldVersion]:
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            self._released.set()
