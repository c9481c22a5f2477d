"""`offbeat eval`: pass@1, pass@k and maj@k with intervals, for stored groups or for a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import Settings, StoredGroups, TaskName, TokenizerDirectory, Workers, make_task
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from offbeat.evaluation import Attempts, EvaluationRow
    from offbeat.tasks.task import Task
    from offbeat.types import Group


def eval_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOG_OR_MODEL", help="An experience log, a model directory, or a model of the hub: owner/name"
        ),
    ],
    task: TaskName,
    settings: Settings = None,
    k: Annotated[list[int] | None, typer.Option(help="k of pass@k and maj@k; can be repeated")] = None,
    tokenizer: TokenizerDirectory = None,
    slice_by: Annotated[
        str | None, typer.Option("--slice", help="Show one row for each value of this column, or for each 'version'")
    ] = None,
    correct_at: Annotated[float, typer.Option(help="A completion with at least this reward is correct")] = 1.0,
    prompts: Annotated[int, typer.Option(min=1, help="For a model: number of prompts")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="For a model: completions per prompt")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="For a model: sampling temperature; 0 is greedy")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="For a model: most tokens in a completion")] = 256,
    seed: Annotated[int, typer.Option(help="Seed for prompts, sampling and bootstrap")] = 0,
    workers: Workers = 2,
) -> None:
    """Evaluate the groups in a log, or a model: `offbeat eval runs/one/experience --task arithmetic --k 4`."""
    from offbeat.evaluation import evaluate

    chosen = make_task(task, settings)
    column = slice_by or chosen.slice_by
    with plain_errors():
        if has_log(source):
            found, size = _from_log(source, chosen, tokenizer, column)
            ks = k or [size]
        else:
            from offbeat.run.evaluation import load_model, sample_attempts

            with plain_errors(code=2):
                model = load_model(source, temperature=temperature, max_tokens=max_tokens)
            found = list(
                sample_attempts(model, chosen, column, prompts=prompts, samples=samples, seed=seed, workers=workers)
            )
            ks = k or [samples]
        _print(evaluate(found, ks, correct_at=correct_at, seed=seed))


def _from_log(uri: str, task: "Task", tokenizer: Path | None, column: str | None) -> "tuple[list[Attempts], int]":
    """Return the attempts at each prompt, over all its groups, and the size of the largest group."""
    from offbeat.evaluation import Attempts
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables
    from offbeat.types import Score

    stored = StoredGroups(LogReader(Tables.open(uri)), uri, task, tokenizer)
    answer = task.answer if stored.has_tokenizer else None
    rewards: dict[tuple[str, str], list[float | None]] = {}
    answers: dict[tuple[str, str], list[str | None]] = {}
    largest = 0
    for group in stored.groups():
        key = group.prompt.id, _slice(group, column)
        given = [c.score.reward if isinstance(c.score, Score) else None for c in group.completions]
        rewards.setdefault(key, []).extend(given)
        if answer is not None:
            answers.setdefault(key, []).extend(answer(stored.text(c)) for c in group.completions)
        largest = max(largest, len(given))
    return [Attempts(*key, rewards[key], answers.get(key)) for key in rewards], largest


def _slice(group: "Group", column: str | None) -> str:
    if column == "version":
        return "no version" if group.oldest_version is None else f"version {group.oldest_version:6d}"
    return "all" if column is None else str(group.prompt.columns.get(column, f"no {column}"))


def _print(rows: "list[EvaluationRow]") -> None:
    """Print a table with one column per metric."""
    from rich.console import Console
    from rich.table import Table

    metrics = list(dict.fromkeys(metric for row in rows for metric in row.estimates))
    table = Table("slice", "prompts", "completions", "unscorable", *metrics)
    for row in rows:
        cells = [str(row.estimates[metric]) if metric in row.estimates else "–" for metric in metrics]
        table.add_row(printable(row.slice), str(row.prompts), str(row.completions), str(row.unscorable), *cells)
    Console().print(table)
    typer.echo("means over prompts, with 95 % bootstrap intervals in brackets; unscorable completions are not counted")
