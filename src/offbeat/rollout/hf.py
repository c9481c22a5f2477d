"""The transformers engine: no server, any device, the same bits for the same call.

Each prompt is computed once; its keys and values are repeated for the group. Each completion has its own random stream,
so other completions of the batch affect it only by rounding. A call with the same requests, version and thread count
gives the same bits.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from offbeat.errors import EngineAsleep, EngineDead
from offbeat.rollout.engine import Request, Sampling, Weights
from offbeat.rollout.parity import adapter_shapes, check_adapter
from offbeat.seeds import derive
from offbeat.trainer.adapter import attach, load_adapter
from offbeat.trainer.forward import sequence_logprobs
from offbeat.trainer.loading import read_model
from offbeat.types import Completion, Finish, VersionSpan
from offbeat.weights.adapter import AdapterSpec


def sampled_from(logits_NV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return the log-probs [N, V] after temperature, top-k and top-p, in float32: −inf for excluded tokens.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> sampled_from(logits, 1.0, 1.0, top_k=2).exp().round(decimals=3)
    tensor([[0.7310, 0.2690, 0.0000]])
    """
    logits_NV = logits_NV.float() / temperature
    if top_k and top_k < logits_NV.shape[-1]:
        smallest_N1 = logits_NV.topk(top_k, -1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, -torch.inf)
    if top_p < 1:
        sorted_NV, order_NV = logits_NV.softmax(-1).sort(-1, descending=True)
        # A token stays while the more likely ones sum to less than top_p, so at least one token always stays.
        beyond_NV = sorted_NV.cumsum(-1) - sorted_NV >= top_p
        logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond_NV).scatter_(-1, order_NV, beyond_NV), -torch.inf)
    return torch.log_softmax(logits_NV, -1)


def draw(logprobs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Sample one token per row by inverse transform: `uniform_N` in [0, 1) selects it in the cumulative distribution.

    >>> draw(torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3), torch.tensor([0.1, 0.6, 0.99]))
    tensor([0, 1, 2])
    """
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    sum_N1 = cumulative_NV[:, -1:]  # not exactly 1, because of rounding
    target_N1 = torch.minimum(uniform_N.double()[:, None] * sum_N1, torch.nextafter(sum_N1, torch.zeros_like(sum_N1)))
    # The first sum strictly above the target belongs to a token with probability > 0.
    return torch.searchsorted(cumulative_NV, target_N1, right=True).squeeze(-1)


class HfEngine:
    """An `Engine` on a transformers model, which it owns. A load waits until running generations finish."""

    holds_several: ClassVar = False

    def __init__(self, model: PreTrainedModel, *, version: int = 0, adapter: AdapterSpec | None = None) -> None:
        """Serve a model. With `adapter`, versions are adapters of it, computed beside its weights as in the trainer."""
        self._model = model.eval()
        self._adapter_shapes: dict[str, list[int]] = {}
        if adapter is not None:
            shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
            self._adapter_shapes = adapter_shapes(shapes, adapter)
            attach(model, adapter)
            load_adapter(model, {name: torch.zeros(shape) for name, shape in self._adapter_shapes.items()})  # the base
        self._version: int | None = version
        self._in_use = asyncio.Lock()
        self._asleep: list[tuple[Tensor, Tensor]] = []
        """While it sleeps: each weight, and its values in host memory."""
        self._death = ""

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        dtype: str = "float32",
        device: str | None = None,
        adapter: AdapterSpec | None = None,
    ) -> "HfEngine":
        """Load a model directory as version 0. Code in the directory is never executed."""
        place = device or (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
        return cls(read_model(directory, dtype).to(place), adapter=adapter)

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    @property
    def version(self) -> int | None:
        return self._version

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """See `Engine`. The requests of one call form one batch."""
        stop = threading.Event()
        async with self._in_use:
            version = self._awake()
            try:
                return await asyncio.to_thread(self._generate, requests, version, stop)
            finally:
                stop.set()  # if the call is cancelled, the thread ends at its next token

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        async with self._in_use:
            self._awake()
            return await asyncio.to_thread(sequence_logprobs, self._model, sequences)

    async def load(self, version: int, weights: Weights) -> None:
        async with self._in_use:
            self._awake()
            self._version = None
            try:
                await asyncio.to_thread(self._copy_adapter if self._adapter_shapes else self._copy, dict(weights))
            except BaseException as error:  # the weights may be half copied, so the engine cannot be used any more
                self._death = f"loading version {version} failed: {error}"
                raise EngineDead(self._death) from error
            self._version = version

    def serve(self) -> None:
        """See `Engine`. Every load does it."""

    async def sleep(self) -> None:
        """See `Engine`. The weights wait in host memory; on CPU too, so that use of a sleeping engine cannot work."""
        async with self._in_use:
            self._serving()
            if not self._asleep:
                await asyncio.to_thread(self._let_go)

    async def wake(self) -> None:
        async with self._in_use:
            self._serving()
            for own, kept in self._asleep:
                own.data = kept.to(own.device)
            self._asleep = []

    async def health(self) -> None:
        self._serving()

    async def close(self) -> None:
        self._death = self._death or "the engine was closed"

    def _serving(self) -> int:
        if self._death or self._version is None:
            raise EngineDead(self._death or "the engine has no weights")
        return self._version

    def _awake(self) -> int:
        version = self._serving()
        if self._asleep:
            raise EngineAsleep
        return version

    def _let_go(self) -> None:
        own = [*self._model.parameters(), *self._model.buffers()]  # tied weights come once
        self._asleep = [(tensor, tensor.data.to("cpu", copy=True)) for tensor in own]
        for tensor in own:
            tensor.data = tensor.data.new_empty(0)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # for other processes

    def _copy_adapter(self, weights: dict[str, Tensor]) -> None:
        load_adapter(self._model, dict(check_adapter(weights.items(), self._adapter_shapes)))

    @torch.inference_mode()
    def _copy(self, weights: dict[str, Tensor]) -> None:
        own = self._model.state_dict(keep_vars=True)
        if unknown := sorted(weights.keys() - own.keys()):
            raise ValueError(f"the model has no weights called {', '.join(unknown[:3])}")
        given = {own[name].data_ptr() for name in weights}
        if missing := sorted(name for name, tensor in own.items() if tensor.data_ptr() not in given):  # tied: one name
            raise ValueError(f"weights are missing: {', '.join(missing[:3])}")
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(own[name].shape)}, but {list(tensor.shape)} was given")
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    @torch.inference_mode()
    def _generate(
        self, requests: Sequence[Request], version: int, stop: threading.Event
    ) -> list[tuple[Completion, ...]]:
        found: dict[str, Completion] = {}
        for sampling in dict.fromkeys(request.sampling for request in requests):
            rows = [
                _Row(request, index)
                for request in requests
                if request.sampling == sampling
                for index in range(request.size)
            ]
            self._sample(rows, sampling, stop)
            found |= {(done := row.completion(version)).id: done for row in rows}
        return [tuple(found[request.completion_id(i)] for i in range(request.size)) for request in requests]

    def _sample(self, rows: "list[_Row]", sampling: Sampling, stop: threading.Event) -> None:
        """Sample token by token until every row has ended."""
        device = self._model.device
        logits_NV, cache, present_NT = self._prefill(rows)
        stops = set(sampling.stop_token_ids)
        stops_S = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        active = list(range(len(rows)))  # for each line of the batch, the index of its row
        for position in range(sampling.max_tokens):
            if position < sampling.min_tokens:
                logits_NV = logits_NV.index_fill(-1, stops_S, -torch.inf)
            logprobs_NV = sampled_from(logits_NV, sampling.temperature, sampling.top_p, sampling.top_k)
            uniform_N = torch.tensor([rows[row].uniforms[position] for row in active], dtype=torch.float64)
            ids_N = draw(logprobs_NV, uniform_N.to(device))
            chosen_N = logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)
            for row, token, logprob in zip(active, ids_N.tolist(), chosen_N.tolist(), strict=True):
                if not rows[row].ended:
                    rows[row].append(token, logprob, ends=token in stops)
            unfinished = [line for line, row in enumerate(active) if not rows[row].ended]
            if not unfinished or position + 1 == sampling.max_tokens:
                return
            if stop.is_set():
                raise asyncio.CancelledError
            if 2 * len(unfinished) <= len(active):  # a finished line costs as much as any other until it is removed
                keep = torch.tensor(unfinished, device=device)
                cache.batch_select_indices(keep)
                present_NT, ids_N, active = present_NT[keep], ids_N[keep], [active[line] for line in unfinished]
            present_NT = torch.cat([present_NT, present_NT.new_ones(len(active), 1)], 1)
            logits_NV = self._model(
                input_ids=ids_N[:, None],
                attention_mask=present_NT,
                position_ids=present_NT.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

    def _prefill(self, rows: "list[_Row]") -> tuple[Tensor, DynamicCache, Tensor]:
        """Compute each prompt once; return logits, cache and mask with one line per row."""
        prompts = list({row.request.id: row.request.prompt_ids for row in rows}.values())
        order = {request_id: line for line, request_id in enumerate(dict.fromkeys(row.request.id for row in rows))}
        longest = max(len(prompt) for prompt in prompts)
        ids_PT = torch.zeros(len(prompts), longest, dtype=torch.long)
        present_PT = torch.zeros_like(ids_PT)
        for line, prompt in enumerate(prompts):  # padded on the left, so that all continue at the same column
            ids_PT[line, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            present_PT[line, longest - len(prompt) :] = 1
        device, cache = self._model.device, DynamicCache(config=self._model.config)
        ids_PT, present_PT = ids_PT.to(device), present_PT.to(device)
        logits_PV = self._model(
            input_ids=ids_PT,
            attention_mask=present_PT,
            position_ids=(present_PT.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        lines = torch.tensor([order[row.request.id] for row in rows], device=device)
        cache.batch_select_indices(lines)
        return logits_PV[lines], cache, present_PT[lines]


@dataclass
class _Row:
    """One completion while it is generated."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    uniforms: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        stream = np.random.default_rng(derive(self.request.seed, "sampling", self.index))
        self.uniforms = stream.random(self.request.sampling.max_tokens)

    def append(self, token: int, logprob: float, *, ends: bool) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.ended = ends

    def completion(self, version: int) -> Completion:
        return Completion(
            id=self.request.completion_id(self.index),
            token_ids=np.array(self.tokens, np.int32),
            behavior_logprobs=np.array(self.logprobs, np.float32),
            versions=(VersionSpan(version, 0, len(self.tokens)),),
            finish=Finish.STOP if self.ended else Finish.LENGTH,
        )
