"""Which tokens end a completion: all that the model's generation config lists, and the tokenizer's own.

Chat models list several, for example the end of a turn and the end of the text. With one of them missing, completions
that end with it would continue to the length limit.
"""

from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase


def stop_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of all tokens that end a completion; empty if neither names one."""
    listed = generation.eos_token_id if generation is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(one for one in [*ids, tokenizer.eos_token_id] if one is not None))


def read_generation_config(model_dir: Path) -> GenerationConfig:
    """Read the generation config of a model directory; without generation_config.json, take it from config.json."""
    if (model_dir / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(model_dir), local_files_only=True)
    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    return GenerationConfig.from_model_config(config)
