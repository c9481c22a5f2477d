"""Load tokenizers, with values for the variables of their chat templates, and say which tokens end a completion.

A value becomes the default of its variable in the template itself. So whatever applies the template uses it: training,
evaluation, and every library that loads the exported model. A caller that gives the variable another value gets it.

Chat models have several tokens that end a completion, for example the end of a turn and the end of the text. With one
of them missing, completions that end with it would continue to the length limit.
"""

import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from offbeat.errors import ModelUnreadable, first_line, suggest_nearest
from offbeat.types import Group, Json

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Template = str | dict[str, "Template"]
"""A chat template, or several by name."""
_ALWAYS_SET: Final = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables that transformers gives a value, so that a default has no effect."""


def read_tokenizer(
    directory: Path, chat_template_kwargs: Mapping[str, Json] | None = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a directory. Nothing is downloaded and no code of the directory is run.

    `chat_template_kwargs` are values for variables of its chat template. Raises `ModelUnreadable` with one sentence.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise ModelUnreadable(f"{directory} is not a directory; give one with the files of a tokenizer")
    try:
        found = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises Exception itself, and transformers whatever damaged files cause
        raise ModelUnreadable(
            f"the tokenizer in {directory} cannot be loaded: {first_line(error)}; copy tokenizer.json and "
            "tokenizer_config.json of the model there again"
        ) from error
    if chat_template_kwargs:
        if problem := variable_problem(str(found.chat_template or ""), chat_template_kwargs):
            raise ModelUnreadable(f"{directory}: {problem}")
        found.chat_template = with_defaults(found.chat_template, chat_template_kwargs)
    return cast("PreTrainedTokenizerBase", found)


@contextmanager
def rendering() -> Iterator[None]:
    """Stop a chat template that does not end, or builds gigabytes. Only on the main thread, where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def look(*_: object) -> None:
        if time.monotonic() - began > 10 or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held > 1 << 20:  # KiB
            raise ModelUnreadable("the model's chat template takes more than 10 s or 1 GiB; use a model with another")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def decoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[Sequence[int]], str]:
    """Return the function from token ids to the text that scorers see: without special tokens."""
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def in_words(group: Group, tokenizer: "PreTrainedTokenizerBase") -> Group:
    """Return a group with text: its prompt as the model reads it, its completions as scorers see them."""
    prompt = replace(group.prompt, text=str(tokenizer.decode(group.prompt.token_ids.tolist())))
    completions = (replace(one, text=decoder(tokenizer)(one.token_ids.tolist())) for one in group.completions)
    return replace(group, prompt=prompt, completions=tuple(completions))


def with_defaults(template: Template, values: Mapping[str, Json]) -> Template:
    """Return a chat template in which variables that are not given have these values.

    >>> with_defaults("{{ messages }}", {"enable_thinking": False})
    '{%- if enable_thinking is not defined %}{%- set enable_thinking = False %}{%- endif %}{{ messages }}'
    """
    if isinstance(template, dict):
        return {name: with_defaults(one, values) for name, one in template.items()}
    defaults = (f"{{%- if {k} is not defined %}}{{%- set {k} = {v!r} %}}{{%- endif %}}" for k, v in values.items())
    return "".join(defaults) + template


def variable_problem(template: str, names: Iterable[str]) -> str:
    """Return why values for these variables of a chat template would have no effect, or nothing.

    >>> variable_problem("{% if enable_thinking %}<think>{% endif %}", ["enable_thinkin"])
    "its chat template has no variable 'enable_thinkin'; did you mean 'enable_thinking'?"
    """
    if not template:
        return "its tokenizer has no chat template, so chat_template_kwargs has no effect; leave it out"
    words = set(re.findall(r"[a-zA-Z_]\w*", " ".join(re.findall(r"{[{%].*?[%}]}", template, re.S)))) - _ALWAYS_SET
    for name in names:
        if name not in words:
            near = suggest_nearest(name, sorted(words))
            near = near if near.startswith("did") else "leave it out"
            return f"its chat template has no variable {name!r}; {near}"
    return ""


def stop_tokens(generation: "GenerationConfig | None", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the ids of all tokens that end a completion; empty if neither names one."""
    listed = generation.eos_token_id if generation is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(one for one in [*ids, tokenizer.eos_token_id] if one is not None))


def read_generation_config(model_dir: Path) -> "GenerationConfig":
    """Read the generation config of a model directory; without generation_config.json, take it from config.json."""
    from transformers import AutoConfig, GenerationConfig

    if (model_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(model_dir), local_files_only=True)
    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(config)
