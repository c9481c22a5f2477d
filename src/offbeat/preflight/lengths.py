"""How long prompts and completions are, read from the data of a run. No torch."""

from itertools import islice
from typing import Final

from offbeat.config import Config
from offbeat.imports import missing_modules
from offbeat.preflight.forecast import Lengths, ModelFiles
from offbeat.preflight.log_contents import log_exists
from offbeat.tasks.data import Deferred
from offbeat.tasks.task import make

READ: Final = 64
"""Prompts that are read."""
TEMPLATE: Final = 8
"""Tokens that a chat template adds to each message, about."""


def data_lengths(config: Config, files: ModelFiles) -> Lengths | None:
    """Return the mean lengths in the data, or None if only a download or a run would tell.

    Completions that have yet to be generated count as long as `sampling.max_tokens` allows.
    """
    if config.run.mode == "offline":
        return _of_log(config)
    options, file = config.task.options, files.path / "tokenizer.json"
    examples = make(config.task.name, options).examples
    local = str(options.get("source", config.task.name)).endswith((".py", ".jsonl", ".parquet"))
    if not file.is_file() or missing_modules(["tokenizers"]) or (isinstance(examples, Deferred) and not local):
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises nothing narrower; a run that cannot read the file says so
        return None
    counts = []
    for one in islice(examples, READ):
        messages = [{"content": one.prompt}] if isinstance(one.prompt, str) else one.prompt
        added = 0 if isinstance(one.prompt, str) else TEMPLATE * len(messages)
        counts.append(added + sum(len(tokenizer.encode(str(message["content"])).ids) for message in messages))
    fitting = [count for count in counts if count <= config.engine.max_prompt_tokens]
    return Lengths(sum(fitting) / len(fitting), config.sampling.max_tokens) if fitting else None


def _of_log(config: Config) -> Lengths | None:
    """Count the tokens of the log; a group counts its prompt once."""
    if missing_modules(["lance"]) or not log_exists(config.run.experience):
        return None
    from offbeat.experience.reader import LogReader

    rows = LogReader.open(config.run.experience).index_since(None)[0]
    completions = int(rows.completions.sum())
    return Lengths(0.0, float(rows.tokens.sum()) / completions) if completions else None
