"""A tokenizer of characters and a model of random weights, small enough for tests."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*= .abcdefghijklmnopqrstuvwxyz?<>/"
CHAT = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """What `save_tokenizer` saved."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def save_tokenizer(directory: Path, *, chat: bool = False) -> None:
    """One token per character; with `chat`, a template that brackets each message."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = CHAT
    fast.save_pretrained(directory)


def save_model(directory: Path) -> None:
    """Random weights, fixed by a seed: a few of its answers are right by chance."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def save_llama(directory: Path, *, tied: bool, seed: int = 0) -> "LlamaForCausalLM":
    """A model that vLLM serves on CPU too (head size 32), tied or not; its weights are wide, so that a change shows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model
