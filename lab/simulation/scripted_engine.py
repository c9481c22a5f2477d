"""An engine without a model, for tests and simulation: its probabilities come from a hash of the weights.

It behaves like an engine in every way that matters to its callers: other weights give other log-probs, the same request
gives the same group, and behavior log-probs are those of the sampled distribution. It fails on demand.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import EngineAsleep, EngineDead
from offbeat.rollout.engine import Request, Weights
from offbeat.seeds import derive
from offbeat.types import Completion, Finish, VersionSpan
from offbeat.weights.probe import Probe, Sequences


def bigrams(weights: Weights, vocabulary: int) -> NDArray[np.float64]:
    """Return the log-probs [previous, next] of a policy with these weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    rng = np.random.default_rng(int.from_bytes(digest.digest()[:8], "big"))
    logits = rng.normal(size=(vocabulary, vocabulary))
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def scripted_probe(weights: Weights, vocabulary: int, sequences: Sequences) -> Probe:
    """Return the probe that a trainer would publish with these weights."""
    table = bigrams(weights, vocabulary)
    return Probe(sequences, [table[list(one[:-1]), list(one[1:])] for one in sequences])


async def _at_once(request: Request) -> None:
    return None


class ScriptedEngine:
    """An `Engine` that samples from bigrams.

    >>> import asyncio
    >>> from offbeat.rollout.engine import Sampling
    >>> engine = ScriptedEngine(vocabulary=16)
    >>> [answers] = asyncio.run(engine.generate([Request("g7", [3], 4, Sampling(8, (1,)), seed=5)]))
    >>> answers[2].id, answers[2].versions[0].version
    ('g7/2', 0)
    """

    def __init__(
        self,
        vocabulary: int,
        weights: Weights = (),
        *,
        takes: Callable[[Request], Awaitable[None]] = _at_once,
        dies_at: int | None = None,
        deaf: bool = False,
        holds_several: bool = False,
    ) -> None:
        """Create an engine that serves version 0.

        Args:
            vocabulary: Number of token ids.
            weights: The weights of version 0.
            takes: Awaited for every request, so that a test decides how long it takes.
            dies_at: The engine is dead from this generate call on, counted from 0.
            deaf: Loads are acknowledged but change nothing: the fault that a probe detects.
            holds_several: Whether a loaded version generates only after `serve`.
        """
        self._vocabulary, self._takes, self._dies_at, self._deaf = vocabulary, takes, dies_at, deaf
        self.holds_several = holds_several
        self._table = self._served = bigrams(weights, vocabulary)
        self._version = self._last = 0
        self._calls = 0
        self._dead = False
        self._asleep = False
        self.loads: list[int] = []

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Sample from the version at the start of the call. A load during the call takes effect with the next call."""
        self._dead |= self._calls == self._dies_at
        self._calls += 1
        await self._check_awake()
        version, table = self._version, self._served
        for request in requests:
            await self._takes(request)
            await self.health()
        return [tuple(_sample(table, request, i, version) for i in range(request.size)) for request in requests]

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        await self._check_awake()
        return [self._table[list(one[:-1]), list(one[1:])].astype(np.float32) for one in sequences]

    async def load(self, version: int, weights: Weights) -> None:
        await self._check_awake()
        if not self._deaf:
            self._table = bigrams(weights, self._vocabulary)
        self._last = version
        self.loads.append(version)
        if not self.holds_several:
            self.serve()

    def serve(self) -> None:
        self._version, self._served = self._last, self._table

    async def sleep(self) -> None:
        await self.health()
        self._asleep = True

    async def wake(self) -> None:
        await self.health()
        self._asleep = False

    async def health(self) -> None:
        if self._dead:
            raise EngineDead("the script ended it")

    async def close(self) -> None:
        self._dead = True

    async def _check_awake(self) -> None:
        await self.health()
        if self._asleep:
            raise EngineAsleep


def _sample(table: NDArray[np.float64], request: Request, index: int, version: int) -> Completion:
    rng = np.random.default_rng(derive(request.seed, index))
    sampling = request.sampling
    tokens: list[int] = []
    logprobs: list[float] = []
    last = int(request.prompt_ids[-1])
    while len(tokens) < sampling.max_tokens and last not in (sampling.stop_token_ids if tokens else ()):
        logits = table[last] / sampling.temperature
        chances = np.exp(logits) / np.exp(logits).sum()
        last = int(rng.choice(len(chances), p=chances))
        tokens.append(last)
        logprobs.append(float(np.log(chances[last])))
    return Completion(
        id=request.completion_id(index),
        token_ids=np.array(tokens, np.int32),
        behavior_logprobs=np.array(logprobs, np.float32),
        versions=(VersionSpan(version, 0, len(tokens)),),
        finish=Finish.STOP if last in sampling.stop_token_ids else Finish.LENGTH,
    )
