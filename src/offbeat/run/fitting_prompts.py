"""Prompts over the limit are left out in one place, before any engine sees them, and the run says how many.

vLLM would refuse such a prompt and end the worker; transformers would answer it, and the trainer would compute more
tokens than its memory was checked for.
"""

from collections.abc import Callable

from offbeat.config import Config
from offbeat.errors import ModelUnreadable, PromptTooLong
from offbeat.placement.shape import ModelShape
from offbeat.seeds import derive
from offbeat.tasks.data import Tokenizer
from offbeat.tasks.task import Task, prompt_at
from offbeat.types import Prompt

LeftOut = Callable[[int, str], None]
"""Called with the number of prompts left out so far, and a sentence about the latest."""


def prompt_limit(config: Config) -> int:
    """Return the most tokens of a prompt: `engine.max_prompt_tokens`, or less if the model's context is short."""
    limit = config.engine.max_prompt_tokens
    try:
        context = ModelShape.read(config.model.directory()).context
    except ModelUnreadable:  # a model that the device plan does not know
        return limit
    return max(1, min(limit, context - config.sampling.max_tokens))


class FittingPrompts:
    """The prompts of a run's task in their order; None at the places of those that are too long.

    `left_out` is called for the 1st, 10th, 100th … such prompt. Raises `PromptTooLong` if no prompt fits.
    """

    def __init__(self, config: Config, task: Task, tokenizer: Tokenizer, stream: tuple[str, ...], left_out: LeftOut):
        self._order, self._limit = prompt_at(task, tokenizer, derive(config.seed, *stream)), prompt_limit(config)
        self._left_out, self._ids = left_out, set[str]()
        if config.run.mode == "offline":
            return  # nothing asks for prompts
        places = range(len(task.examples))  # each example is at one of them
        if all(self._too_long(self._order(place)) for place in places):
            raise PromptTooLong(
                f"all {len(places)} prompts of task {task.name!r} have more than {self._limit} tokens; raise "
                "engine.max_prompt_tokens, or give the task shorter prompts"
            )

    def _too_long(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) > self._limit

    def __call__(self, position: int) -> Prompt | None:
        prompt = self._order(position)
        if not self._too_long(prompt):
            return prompt
        before = len(self._ids)
        self._ids.add(prompt.id)
        if (count := len(self._ids)) > before and str(count).strip("0") == "1":
            self._left_out(
                count,
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and the limit is {self._limit}: it is left "
                "out, as every longer one; raise engine.max_prompt_tokens to train on it",
            )
        return None
