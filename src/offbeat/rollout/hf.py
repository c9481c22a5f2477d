"""The transformers engine: no server, any device, the same bits for the same call.

Prompts are computed once and their keys and values repeated for the group. Every completion draws from its own stream
of numbers, so what it becomes does not depend on its neighbours beyond rounding, and a call repeated with the same
requests, version and thread count is repeated bit for bit.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from offbeat.errors import EngineDead
from offbeat.objective.logprobs import token_stats
from offbeat.rollout.engine import Request, Sampling, Weights
from offbeat.seeds import derive
from offbeat.types import Completion, Finish, VersionSpan


def sampled_from(logits_NV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Log-probs [N, V] after temperature, top-k and top-p, in float32; what cannot be drawn has −inf.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> sampled_from(logits, 1.0, 1.0, top_k=2).exp().round(decimals=3)
    tensor([[0.7310, 0.2690, 0.0000]])
    """
    logits_NV = logits_NV.float() / temperature
    if top_k and top_k < logits_NV.shape[-1]:
        smallest_N1 = logits_NV.topk(top_k, -1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, -torch.inf)
    if top_p < 1:
        ordered_NV, places_NV = logits_NV.softmax(-1).sort(-1, descending=True)
        # A token stays where those before it do not yet make up top_p, so at least one always stays.
        beyond_NV = ordered_NV.cumsum(-1) - ordered_NV >= top_p
        logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond_NV).scatter_(-1, places_NV, beyond_NV), -torch.inf)
    return torch.log_softmax(logits_NV, -1)


def draw(logprobs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """One token a row, where its own number in [0, 1) falls among the cumulated probabilities.

    >>> draw(torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3), torch.tensor([0.1, 0.6, 0.99]))
    tensor([0, 1, 2])
    """
    cumulated_NV = logprobs_NV.double().exp().cumsum(-1)
    sum_N1 = cumulated_NV[:, -1:]  # which rounding keeps from being 1
    aim_N1 = torch.minimum(uniform_N.double()[:, None] * sum_N1, torch.nextafter(sum_N1, torch.zeros_like(sum_N1)))
    # The first that lies strictly above the aim is a token that adds something: none of probability 0 is drawn.
    return torch.searchsorted(cumulated_NV, aim_N1, right=True).squeeze(-1)


class HfEngine:
    """An `Engine` over a transformers model, which it owns. A load waits until what is being generated is finished."""

    def __init__(self, model: PreTrainedModel, *, version: int = 0) -> None:
        self._model = model.eval()
        self._version: int | None = version
        self._turn = asyncio.Lock()
        self._dead = ""

    @classmethod
    def start(cls, directory: Path, *, dtype: str = "float32", device: str | None = None) -> "HfEngine":
        """From a model directory, which counts as version 0; code that comes with it is not run."""
        place = device or (torch.accelerator.current_accelerator() or torch.device("cpu"))
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        return cls(model.to(place))

    @property
    def model(self) -> PreTrainedModel:
        """What it computes with."""
        return self._model

    @property
    def version(self) -> int | None:
        """See `Engine`."""
        return self._version

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """See `Engine`. Requests of one call are one batch."""
        stop = threading.Event()
        async with self._turn:
            version = self._serving()
            try:
                return await asyncio.to_thread(self._generate, requests, version, stop)
            finally:
                stop.set()  # a caller that is cancelled leaves the thread behind: it ends at its next token

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """See `Engine`."""
        async with self._turn:
            self._serving()
            return await asyncio.to_thread(sequence_logprobs, self._model, sequences)

    async def load(self, version: int, weights: Weights) -> None:
        """See `Engine`."""
        async with self._turn:
            self._serving()
            self._version = None
            try:
                await asyncio.to_thread(self._copy, dict(weights))
            except BaseException as error:  # half of it may be copied: whatever happened, this engine is done
                self._dead = f"loading version {version} failed: {error}"
                raise EngineDead(self._dead) from error
            self._version = version

    async def health(self) -> None:
        """See `Engine`."""
        self._serving()

    async def close(self) -> None:
        """See `Engine`."""
        self._dead = self._dead or "the engine was closed"

    def _serving(self) -> int:
        if self._dead or self._version is None:
            raise EngineDead(self._dead or "the engine has no weights")
        return self._version

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
                raise ValueError(f"{name} is {list(own[name].shape)} and was given as {list(tensor.shape)}")
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
        """Token by token until every row has ended."""
        device = self._model.device
        logits_NV, cache, present_NT = self._prefill(rows)
        stops = set(sampling.stop_token_ids)
        writing = list(range(len(rows)))  # which row each line of the batch belongs to
        for position in range(sampling.max_tokens):
            logprobs_NV = sampled_from(logits_NV, sampling.temperature, sampling.top_p, sampling.top_k)
            uniform_N = torch.tensor([rows[row].uniforms[position] for row in writing], dtype=torch.float64)
            ids_N = draw(logprobs_NV, uniform_N.to(device))
            chosen_N = logprobs_NV.gather(-1, ids_N[:, None]).squeeze(-1)
            for row, token, logprob in zip(writing, ids_N.tolist(), chosen_N.tolist(), strict=True):
                if not rows[row].ended:
                    rows[row].write(token, logprob, ends=token in stops)
            going = [line for line, row in enumerate(writing) if not rows[row].ended]
            if not going or position + 1 == sampling.max_tokens:
                return
            if stop.is_set():
                raise asyncio.CancelledError
            if 2 * len(going) <= len(writing):  # lines that have ended cost as much as others until they are taken out
                keep = torch.tensor(going, device=device)
                cache.batch_select_indices(keep)
                present_NT, ids_N, writing = present_NT[keep], ids_N[keep], [writing[line] for line in going]
            present_NT = torch.cat([present_NT, present_NT.new_ones(len(writing), 1)], 1)
            logits_NV = self._model(
                input_ids=ids_N[:, None],
                attention_mask=present_NT,
                position_ids=present_NT.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

    def _prefill(self, rows: "list[_Row]") -> tuple[Tensor, DynamicCache, Tensor]:
        """Each prompt once; then logits, cache and mask with a line for every row."""
        prompts = list({row.request.id: row.request.prompt_ids for row in rows}.values())
        order = {request_id: place for place, request_id in enumerate(dict.fromkeys(row.request.id for row in rows))}
        longest = max(len(prompt) for prompt in prompts)
        ids_PT = torch.zeros(len(prompts), longest, dtype=torch.long)
        present_PT = torch.zeros_like(ids_PT)
        for place, prompt in enumerate(prompts):  # padded on the left, so that all continue at the same column
            ids_PT[place, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            present_PT[place, longest - len(prompt) :] = 1
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
        line = torch.tensor([order[row.request.id] for row in rows], device=device)
        cache.batch_select_indices(line)
        return logits_PV[line], cache, present_PT[line]


@dataclass
class _Row:
    """One completion being written."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    uniforms: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        stream = np.random.default_rng(derive(self.request.seed, "sampling", self.index))
        self.uniforms = stream.random(self.request.sampling.max_tokens)

    def write(self, token: int, logprob: float, *, ends: bool) -> None:
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


@torch.inference_mode()
def sequence_logprobs(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """For each sequence of n tokens the n − 1 log-probs of its tokens after the first, at temperature 1."""
    lengths = torch.tensor([len(one) for one in sequences])
    ids_NT = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, one in enumerate(sequences):
        ids_NT[row, : len(one)] = torch.tensor(one)
    present_NT = torch.arange(ids_NT.shape[1]) < lengths[:, None]
    ids_NT, mask_NT = ids_NT.to(model.device), present_NT.long().to(model.device)
    hidden_NTH = model.base_model(input_ids=ids_NT, attention_mask=mask_NT, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    logprobs_NT = token_stats(hidden_NTH[:, :-1], head.weight, ids_NT[:, 1:], bias=head.bias).logprobs.cpu()
    return [one[: length - 1].numpy() for one, length in zip(logprobs_NT, lengths.tolist(), strict=True)]
