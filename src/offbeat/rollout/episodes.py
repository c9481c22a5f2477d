"""Groups of several turns: the engine writes, the task's environment answers, and so on until one of them ends it.

Environments are plain blocking code, so every episode plays in a thread of its own and asks the event loop for tokens.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from offbeat.rollout.engine import Engine, Request
from offbeat.seeds import derive
from offbeat.tasks.environment import Environment, Turn, play
from offbeat.types import UNKNOWN, Completion, Prompt


@dataclass(frozen=True)
class Episodes:
    """How a task of several turns is played."""

    environment: Callable[[Prompt], Environment]
    """A fresh one for every completion."""
    encode: Callable[[str], Sequence[int]]
    """Tokens of a reply."""
    decode: Callable[[Sequence[int]], str]
    max_turns: int = 8

    async def play(self, engine: Engine, prompt: Prompt, request: Request) -> tuple[Completion, ...]:
        """All completions of a group, at the same time."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(request.size, thread_name_prefix="episode") as threads:
            played = [
                loop.run_in_executor(threads, self._one, engine, prompt, request, index, loop)
                for index in range(request.size)
            ]
            return tuple(await asyncio.gather(*played))

    def _one(
        self, engine: Engine, prompt: Prompt, request: Request, index: int, loop: asyncio.AbstractEventLoop
    ) -> Completion:
        start = request.prompt_ids.tolist()
        limit = request.sampling.max_tokens

        def generate(written: Sequence[int]) -> Turn:
            turn = Request(
                f"{request.completion_id(index)}@{len(written)}",
                [*start, *written],
                size=1,
                sampling=replace(request.sampling, max_tokens=limit - len(written)),
                seed=derive(request.seed, "episode", index, len(written)),
            )
            [[said]] = asyncio.run_coroutine_threadsafe(engine.generate([turn]), loop).result()
            return _turn(said)

        episode = play(
            self.environment(prompt), generate, self.encode, self.decode, max_tokens=limit, max_turns=self.max_turns
        )
        return episode.completion(request.completion_id(index))


def _turn(said: Completion) -> Turn:
    assert said.behavior_logprobs is not UNKNOWN  # an engine knows what it sampled from
    versions = [span.version for span in said.versions for _ in range(span.start, span.end)]
    return Turn(said.token_ids.tolist(), said.behavior_logprobs.tolist(), versions, said.finish)
