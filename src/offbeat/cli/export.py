"""`offbeat export`: write a checkpoint as a Hugging Face model directory."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.reports.working import Working


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint directory, or a run directory to export its newest checkpoint")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; must be new or empty")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="The type the weights are rounded to")
    ] = "bfloat16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; default: `tokenizer` in the run directory")
    ] = None,
) -> None:
    """Write the policy model for transformers, vLLM and others: `offbeat export runs/one out`.

    Every byte of the checkpoint is verified first.
    """
    with plain_errors(), Working("loading torch") as working:
        import torch

        from offbeat.trainer.export import export as write

        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        working.next("verifying the checkpoint and writing the model")
        made = write(checkpoint, out, dtype=dtypes[dtype], tokenizer=tokenizer)
    typer.echo(f"step {made.step} of {printable(str(made.folder))} written in {dtype} to {printable(str(out))}")
