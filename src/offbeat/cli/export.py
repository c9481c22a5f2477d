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
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="The type the weights are rounded to; default: bfloat16"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; default: `tokenizer` in the run directory")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge an adapter into its base and write whole weights")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Directory of an adapter's base; default: the model of the run's configuration")
    ] = None,
) -> None:
    """Write the policy model for transformers, vLLM and others: `offbeat export runs/one out`.

    Every byte of the checkpoint is verified first. The policy of a run with an adapter is written as a directory of
    peft, or with `--merge` as a whole model; both are loaded again and compared with the trainer's log-probs.
    """
    with plain_errors(), Working("loading torch") as working:
        import torch

        from offbeat.trainer.export import export as write

        dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        rounded = None if dtype is None else dtypes[dtype]
        working.next("verifying the checkpoint and writing the model")
        made = write(checkpoint, out, dtype=rounded, tokenizer=tokenizer, merge=merge, base=base)
    adapter = made.manifest.adapter is not None
    how = "as an adapter" if adapter and not merge else f"in {dtype or 'bfloat16'}"
    checked = "; it computes the log-probs of the trainer" if adapter else ""
    typer.echo(f"step {made.step} of {printable(str(made.folder))} written {how} to {printable(str(out))}{checked}")
