"""The protocol of inference engines: tokens in, tokens out, at a known version.

    await engine.load(12, weights)                    # a whole version or an error, never a mixture
    engine.serve()                                    # generate with it
    [answers] = await engine.generate([request])      # a whole group, with log-probs and version spans
    [logprobs] = await engine.logprobs([token_ids])   # of given tokens, to check a probe
    await engine.sleep()                              # its device memory is free until engine.wake()

Engines know nothing of logs, tasks or loops. `hf.py` and `vllm.py` implement the protocol. `within` and `uninterrupted`
are how a worker waits for one.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import DeadlinePassed
from offbeat.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

Weights = Iterable[tuple[str, "Tensor"]]
"""Names and tensors of a Hugging Face state dict, on the host. A tied output head may be left out."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. It is complete: an engine must not use defaults of the model.

    >>> Sampling(max_tokens=16, stop_token_ids=(1,)).temperature
    1.0
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """The first of these ends a completion and is part of it."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 samples from the whole vocabulary."""
    min_tokens: int = 0
    """Before so many tokens no stop token is sampled. Behavior log-probs are of the distribution without them."""


@dataclass(frozen=True)
class Request:
    """A group to generate: `size` completions of one prompt.

    >>> Request("g7", [3, 14, 4], size=8, sampling=Sampling(16, (1,)), seed=5).completion_id(2)
    'g7/2'
    """

    id: str
    """The id of the future group."""
    prompt_ids: NDArray[np.int32]
    size: int
    sampling: Sampling
    seed: int
    """The random stream for its tokens. The same request at the same version gives the same group."""

    def __init__(self, id: str, prompt_ids: ArrayLike, size: int, sampling: Sampling, seed: int) -> None:  # noqa: A002
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "prompt_ids", np.asarray(prompt_ids, np.int32))
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "sampling", sampling)
        object.__setattr__(self, "seed", seed)

    def completion_id(self, index: int) -> str:
        """Return the id of the group's completion number `index`."""
        return f"{self.id}/{index}"


class Engine(Protocol):
    """Generates completions and computes log-probs with versions that it loads.

    Use it from one event loop; calls may overlap.
    """

    @property
    def version(self) -> int | None:
        """The version that new requests are generated with; None before the first load and while a load replaces it."""

    @property
    def holds_several(self) -> bool:
        """True if a load adds a version beside those that generate, so that it can be checked before it generates.

        Otherwise a load replaces the version.
        """

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Generate the completions of each request, without scores, in the order of the requests.

        Behavior log-probs are those of the sampled distribution, after temperature. Version spans are contiguous,
        cover the completion, and never decrease. Cancelling the call cancels the generation.
        """

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the n − 1 log-probs of each sequence of n tokens, from its second token on, at temperature 1.

        They are of the version loaded last, which need not be the one that generates.
        """

    async def load(self, version: int, weights: Weights) -> None:
        """Take a version. After an error the engine is dead.

        An engine that holds several versions goes on generating with the others until `serve`. Any other generates
        with the new one from now on; running generations continue under it or finish first, depending on settings.
        """

    def serve(self) -> None:
        """Generate new requests with the version loaded last. Running ones end with theirs.

        It does nothing in an engine that holds one version.
        """

    async def sleep(self) -> None:
        """Let go of device memory, after running calls. Until `wake`, calls other than `health` raise `EngineAsleep`.

        The version stays. A second call does nothing.
        """

    async def wake(self) -> None:
        """Take the device memory again and serve the same version as before. Does nothing if the engine is awake."""

    async def health(self) -> None:
        """Raise `EngineDead` if the engine cannot answer."""

    async def close(self) -> None:
        """Shut the engine down, with every process it started."""


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """Return the result of `work`, or raise `DeadlinePassed` that names `what` was waited for.

    >>> asyncio.run(within(0.01, "weights v12 on worker 3", asyncio.sleep(60)))
    Traceback (most recent call last):
    offbeat.errors.DeadlinePassed: waited 0.01 s for weights v12 on worker 3
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():  # the work itself raised it
            raise
        raise DeadlinePassed(f"waited {seconds:g} s for {what}") from None


async def uninterrupted(work: Awaitable[T]) -> T:
    """Finish `work` even if the caller is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def all_of(jobs: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Return the results in order. If one fails, or the caller is cancelled, cancel the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
