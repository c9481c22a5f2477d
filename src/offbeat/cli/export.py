"""`offbeat export`: a checkpoint as a plain Hugging Face directory."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.cli.terminal import plain_errors, printable


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's directory, or a run's: then its newest one")],
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet, or is empty")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="What the weights are rounded to")
    ] = "bfloat16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where tokenizer files are; `tokenizer` in the run's directory unless given")
    ] = None,
) -> None:
    """Write the policy for transformers, vLLM and others: `offbeat export runs/one out`.

    Every byte of the checkpoint is verified first.
    """
    import torch

    from offbeat.trainer.export import export as write

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    with plain_errors():
        made = write(checkpoint, out, dtype=dtypes[dtype], tokenizer=tokenizer)
    typer.echo(f"step {made.step} of {printable(str(made.folder))} in {dtype}: {printable(str(out))}")
