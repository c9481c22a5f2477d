"""`offbeat eval`: pass@1, pass@k and maj@k with intervals, of stored groups or of a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import Settings, Stored, TaskName, TokenizerDirectory, Workers, make_task
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from offbeat.evaluation import Attempts, EvaluationRow
    from offbeat.tasks.task import Task
    from offbeat.types import Group


def eval_(
    source: Annotated[
        str, typer.Argument(metavar="LOG_OR_MODEL", help="An experience log, a model's directory, or hf:owner/name")
    ],
    task: TaskName,
    settings: Settings = None,
    k: Annotated[list[int] | None, typer.Option(help="For pass@k and maj@k; may be repeated")] = None,
    tokenizer: TokenizerDirectory = None,
    slice_by: Annotated[
        str | None, typer.Option("--slice", help="A column, or 'version': one row of the table each")
    ] = None,
    correct_at: Annotated[float, typer.Option(help="The reward from which a completion is correct")] = 1.0,
    prompts: Annotated[int, typer.Option(min=1, help="Of a model: prompts to ask")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Of a model: completions of each prompt")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Of a model: 0 is greedy")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a model: longest completion")] = 256,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling and bootstrap")] = 0,
    workers: Workers = 2,
) -> None:
    """Evaluate what a log holds, or a model: `offbeat eval runs/one/experience --task arithmetic --k 4`."""
    from offbeat.evaluation import evaluate

    chosen = make_task(task, settings)
    column = slice_by or chosen.slice_by
    with plain_errors():
        if has_log(source):
            found, size = _from_log(source, chosen, tokenizer, column)
            ks = k or [size]
        else:
            from offbeat.run.evaluation import attempts, load_model

            model = load_model(source, temperature=temperature, max_tokens=max_tokens)
            found = list(attempts(model, chosen, column, prompts=prompts, samples=samples, seed=seed, workers=workers))
            ks = k or [samples]
        _print(evaluate(found, ks, correct_at=correct_at, seed=seed))


def _from_log(uri: str, task: "Task", tokenizer: Path | None, column: str | None) -> "tuple[list[Attempts], int]":
    """Attempts by prompt, groups of one prompt taken together; and the size of the largest group."""
    from offbeat.evaluation import Attempts
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables
    from offbeat.types import Score

    stored = Stored(LogReader(Tables.open(uri)), uri, task, tokenizer)
    answer = task.answer if stored.readable else None
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
    """A table whose columns are the metrics."""
    from rich.console import Console
    from rich.table import Table

    metrics = list(dict.fromkeys(metric for row in rows for metric in row.estimates))
    table = Table("slice", "prompts", "completions", "unscorable", *metrics)
    for row in rows:
        cells = [str(row.estimates[metric]) if metric in row.estimates else "–" for metric in metrics]
        table.add_row(printable(row.slice), str(row.prompts), str(row.completions), str(row.unscorable), *cells)
    Console().print(table)
    typer.echo("means over prompts; in brackets 95 % bootstrap intervals over prompts; unscorable ones do not count")
