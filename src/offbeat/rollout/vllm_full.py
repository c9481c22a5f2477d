"""How a vLLM engine with full weights changes its version: one at a time, replaced by each load.

    load(version, weights)    1 load beside the version that generates (on CPU)
                              2 pause: keep running requests, or drain them
                              3 the loaded version takes over, new version label
                              4 restart requests without a token, with the new salt
                              5 resume

Why step 4: weights may change while a request waits in vLLM's queue or is halfway through its prompt. Then it would
find keys and values of the previous version under its own salt, which is the load under which it was submitted. With
step 4 the salt is exact: a completion with one version span was computed by that version from its first prompt token to
its last. Only a request that already has tokens continues with its keys and values; its completion has two version
spans. On GPU step 3 is the whole reload.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.rollout.engine import Weights
from offbeat.rollout.vllm_worker import SharedWeights, prepare
from offbeat.rollout.weight_checks import check_weights
from offbeat.types import VersionSpan

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
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
        await prepare(self._llm, shared)
        mode = "keep" if self._on_update == "keep" else "wait"
        # `pause_generation` would sleep 20 ms more while everything waits.
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        paused = time.monotonic()
        self.salt += 1
        submitted_before = list(self._writing)
        await self._llm.collective_rpc("offbeat_take_over", args=(shared.path, shared.table))
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
