"""`offbeat import`: add existing rollouts to an experience log."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import encoder_of, load_tokenizer
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from offbeat.experience.importing.importer import ImportTally


def import_(
    file: Annotated[str, typer.Argument(help="JSONL, Parquet, a saved dataset, a directory, or hf:owner/name")],
    into: Annotated[str, typer.Option(help="The experience log: a path or an object store URI")],
    task: Annotated[str | None, typer.Option(help="The task of the prompts, for example: math")] = None,
    source: Annotated[str | None, typer.Option(help="The author, for example: human, model:qwen")] = None,
    columns: Annotated[str, typer.Option(help="Names of columns: prompt=question,responses=answers")] = "",
    keep: Annotated[str, typer.Option(help="Columns to store with the prompt: answer,difficulty")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the tokenizer; required for text")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to prompts that are text")] = False,
    reward_range: Annotated[str | None, typer.Option(help="Refuse rewards outside of this range: 0,1")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Refuse token ids that are not below this number")] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset")] = "train",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be imported, and write nothing")] = False,
) -> None:
    """Import rollouts: `offbeat import rollouts.jsonl --into runs/one/experience --task math --source model:qwen`.

    The completions can come from any model or person. Importing the same file again adds nothing.
    Use `--dry-run` first to see what would be imported.
    """
    from contextlib import nullcontext

    from offbeat.experience.importing.importer import import_into, layout_of, read_groups
    from offbeat.experience.importing.layout import parse_columns
    from offbeat.experience.importing.records import find_records
    from offbeat.experience.importing.shapes import ImportDefaults
    from offbeat.experience.log import ExperienceLog
    from offbeat.experience.validation import ValidationRules

    with plain_errors():
        records = find_records(file, split)
        layout = layout_of(records, parse_columns(columns), [name for name in keep.split(",") if name])
        typer.echo(printable(f"detected: {layout}"))
        loaded = load_tokenizer(tokenizer) if tokenizer else None
        rules = ValidationRules(
            vocab_size=vocab_size or (len(loaded) if loaded else None), reward_ranges=_ranges(task, reward_range)
        )
        found = read_groups(
            records, layout, ImportDefaults(task, source, encoder_of(loaded, chat=chat) if loaded else None)
        )
        with nullcontext() if dry_run and not has_log(into) else ExperienceLog.open(into, rules=rules) as log:
            tally = import_into(log, found, rules=rules, dry_run=dry_run, on_batch=_show_progress)
    typer.echo(printable(str(tally)))
    if dry_run:
        typer.echo("dry run: nothing was written")


def _show_progress(tally: "ImportTally") -> None:
    """Print a progress line that is overwritten in place, if stderr is a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r{tally.taken} groups imported, {sum(tally.refused.values())} quarantined ", nl=False, err=True)


def _ranges(task: str | None, text: str | None) -> dict[str, tuple[float, float]]:
    if text is None:
        return {}
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--reward-range {text!r} is not a range; give two numbers like 0,1") from None
    if task is None:
        raise typer.BadParameter("--reward-range applies to one task; give its name with --task")
    return {task: (low, high)}
