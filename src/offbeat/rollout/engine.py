"""What an inference engine is to offbeat: tokens in, tokens out, at a version it can name.

    await engine.load(12, weights)                    # all of a version or an error, never a mixture
    [answers] = await engine.generate([request])      # a whole group, with log-probs and version spans
    [logprobs] = await engine.logprobs([token_ids])      # of given tokens: how a probe is checked

Engines know nothing of logs, tasks or loops. `hf.py` and `vllm.py` are real, `scripted.py` is for tests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.types import Completion

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "Tensor"]]
"""Names and tensors as in a Hugging Face state dict, on the host. A tied head may be left out."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. All of it is sent; an engine fills in nothing from a model's defaults.

    >>> Sampling(max_tokens=16, stop_token_ids=(1,)).temperature
    1.0
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """A completion ends with, and includes, the first of these."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 draws from the whole vocabulary."""


@dataclass(frozen=True)
class Request:
    """A group to generate: `size` completions of one prompt.

    >>> Request("g7", [3, 14, 4], size=8, sampling=Sampling(16, (1,)), seed=5).completion_id(2)
    'g7/2'
    """

    id: str
    """Of the group to be."""
    prompt_ids: NDArray[np.int32]
    size: int
    sampling: Sampling
    seed: int
    """The stream its tokens are drawn from; the same request at the same version is the same group."""

    def __init__(self, id: str, prompt_ids: ArrayLike, size: int, sampling: Sampling, seed: int) -> None:  # noqa: A002
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "prompt_ids", np.asarray(prompt_ids, np.int32))
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "sampling", sampling)
        object.__setattr__(self, "seed", seed)

    def completion_id(self, index: int) -> str:
        """What the group's completion number `index` is called."""
        return f"{self.id}/{index}"


class Engine(Protocol):
    """Generates and scores at the version loaded last. One event loop uses it; calls may overlap."""

    @property
    def version(self) -> int | None:
        """What is loaded; None before the first load, and while a load is under way."""

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """A group for each request, unscored, in their order.

        Behavior log-probs are of the distribution sampled from, temperature applied. Version spans are contiguous,
        cover the completion and never decrease. Where the caller is cancelled, so is the generation.
        """

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """For each sequence of n tokens the n − 1 log-probs of its tokens after the first, at temperature 1."""

    async def load(self, version: int, weights: Weights) -> None:
        """Serve this version from now on. An error leaves an engine that is dead.

        What is being generated goes on under the new version, or is finished before, as the engine was made.
        """

    async def health(self) -> None:
        """Raises `EngineDead` where the engine cannot answer."""

    async def close(self) -> None:
        """End it, and every process it started."""
