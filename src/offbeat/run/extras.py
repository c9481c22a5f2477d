"""Which extra brings a module that a light install lacks, and the command that installs it. No torch."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

EXTRAS: Final = (
    dict.fromkeys(["datasets", "lance", "pyarrow", "safetensors", "tokenizers", "torch", "transformers"], "train")
    | dict.fromkeys(["math_verify", "reasoning_gym", "sympy"], "math")
    | {name: name for name in ("ray", "tensorboard", "trackio", "vllm", "wandb")}
    | {"jinja2": "report"}
)
"""Module: extra."""


def command(extra: str) -> str:
    """What to type.

    >>> command("train")
    "pip install 'offbeat[train]'"
    """
    return f"pip install 'offbeat[{extra}]'"


def missing(modules: Iterable[str]) -> list[str]:
    """Those that cannot be imported; nothing is imported to find out.

    >>> missing(["json", "jsonn"])
    ['jsonn']
    """
    return [module for module in modules if find_spec(module) is None]
