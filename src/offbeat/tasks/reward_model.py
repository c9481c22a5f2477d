"""A reward model as a reward: a sequence classifier of transformers with one label, read from a directory.

    offbeat.train("Qwen/Qwen3-0.6B", "models/judge", rows)
    rewards = [reward_model("models/judge")]                    # in a task file

It sees the prompt and the completion, as text or through its own chat template, and its logit is the reward: the number
that TRL computes. It runs on CPU in every scoring process, which loads it once. `task.memory_mib` has to hold it.
"""

import os
import resource
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.errors import HubError, ModelUnreadable, TaskError
from offbeat.hub import check_model, count_elements, model_directory, read_object
from offbeat.tasks.rewards import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LIBRARIES: Final = 1 << 30
"""Bytes of a scoring process beside the weights: torch, transformers and the activations of a group."""


def reward_model(directory: str | os.PathLike[str], *, weight: float = 1.0, name: str = "") -> Reward:
    """Use the reward model in a directory, or `owner/name` of the hub, as a reward."""
    try:
        place = model_directory(os.fspath(directory)).resolve()
    except (HubError, ModelUnreadable) as error:
        raise TaskError(f"reward model {os.fspath(directory)!r}: {error}") from None
    config = read_object(place / "config.json")
    kind, labels = str((config.get("architectures") or ["model"])[0]), len(config.get("id2label") or range(2))
    if not kind.endswith("ForSequenceClassification") or labels != 1:
        raise TaskError(
            f"{place} holds a {kind} with {labels} labels; a reward model is a ...ForSequenceClassification with one"
        )
    call, load = partial(_score, directory=str(place)), partial(_load, directory=str(place))
    return Reward(call, name or place.name, weight, trl=True, setup=load)


def _score(prompts: Sequence[Any], completions: Sequence[Any], *, directory: str, **columns: object) -> list[float]:
    import torch

    model, tokenizer = _load(directory=directory)
    pairs = zip(prompts, completions, strict=True)
    if isinstance(prompts[0], str):
        texts = [prompt + completion for prompt, completion in pairs]
    else:
        texts = [str(tokenizer.apply_chat_template([*one, *other], tokenize=False)) for one, other in pairs]
    inputs: Mapping[str, Any] = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits[:, 0]
    return [float(one) for one in logits]


@cache
def _load(*, directory: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = Path(directory)
    check_model(place)
    needed = 4 * sum(count_elements(file) for file in place.glob("*.safetensors")) + _LIBRARIES
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit not in (resource.RLIM_INFINITY, -1) and needed > limit // 2:  # a worker leaves when half is used
        raise TaskError(f"the reward model in {place} needs more memory: set task.memory_mib = {needed >> 19}")
    model, report = AutoModelForSequenceClassification.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise TaskError(f"the weight files in {place} lack {missing[0]}, so its rewards would be random")
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # the reward is read at the last other token
    return model.eval(), tokenizer
