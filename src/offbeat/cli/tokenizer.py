"""The tokenizer of a directory, for commands that read or show text. Code that comes with it is not run."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.exchange.shapes import Encoder


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer, from the directory alone: nothing is fetched."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise typer.BadParameter(f"--tokenizer {directory} is not a directory")
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--tokenizer {directory} holds no tokenizer that can be loaded: {error}") from error


def encoder_of(tokenizer: "PreTrainedTokenizerBase", *, chat: bool) -> "Encoder":
    """What the importer needs of a tokenizer; with `chat`, a prompt given as text becomes a user's message."""
    from jinja2 import TemplateError

    from offbeat.experience.exchange.shapes import Encoder
    from offbeat.experience.exchange.values import Unreadable

    if chat and not tokenizer.chat_template:
        raise typer.BadParameter("--chat was given, but the tokenizer has no chat template")

    def encode_chat(messages: list[dict[str, str]]) -> list[int]:
        try:
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except TemplateError as error:
            raise Unreadable(f"the chat template refuses the prompt: {error!s:.120}") from error

    return Encoder(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        encode_prompt=lambda text: (
            encode_chat([{"role": "user", "content": text}]) if chat else list(tokenizer.encode(text))
        ),
        encode_chat=encode_chat if tokenizer.chat_template else None,
        end=tokenizer.eos_token_id,
    )
