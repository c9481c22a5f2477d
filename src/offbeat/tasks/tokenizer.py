"""Load tokenizers, for every command that needs one."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from offbeat.errors import ModelUnreadable, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a directory. Nothing is downloaded and no code of the directory is run.

    Raises `ModelUnreadable` with one sentence.
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
    return cast("PreTrainedTokenizerBase", found)
