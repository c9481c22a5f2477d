"""`offbeat eval`: pass@1, pass@k and maj@k with intervals, for a run, a model or stored groups."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from offbeat.cli.task_option import (
    Settings,
    StoredGroups,
    TemplateVariables,
    TokenizerDirectory,
    Workers,
    make_task,
    template_variables,
)
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from rich.table import Table

    from offbeat.evaluation import Attempts, EvaluationRow
    from offbeat.tasks.task import Task
    from offbeat.types import Group

WIDE: Final = 200
"""Columns of a table in a pipe or file, where no line is cut."""


def eval_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_LOG_OR_MODEL",
            help="A run, an experience log, a model directory, or a model of the hub: owner/name",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="The name of a task, or the path of your own file; default: the run's, or all of a log"),
    ] = None,
    settings: Settings = None,
    k: Annotated[list[int] | None, typer.Option(help="k of pass@k and maj@k; can be repeated")] = None,
    tokenizer: TokenizerDirectory = None,
    slice_by: Annotated[
        str | None, typer.Option("--slice", help="Show one row for each value of this column, or for each 'version'")
    ] = None,
    correct_at: Annotated[float, typer.Option(help="A completion with at least this reward is correct")] = 1.0,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Distinct prompts to ask; default: as many as the run, or 64")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt; more if prompts are few")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy")] = 1.0,
    greedy: Annotated[bool, typer.Option(help="Add one greedy completion per prompt")] = True,
    before: Annotated[bool, typer.Option(help="Of a run: evaluate the model that it started from too")] = True,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a completion; default: as in the run, or 256")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling")] = 0,
    workers: Workers = 2,
    chat_template: TemplateVariables = None,
) -> None:
    """Evaluate a run on the prompts it held out, a model, or the groups in a log: `offbeat eval runs/one`."""
    is_log = has_log(source)
    chosen = make_task(task, settings) if task is not None else None
    with plain_errors():
        if is_log:
            from offbeat.evaluation import evaluate as estimate

            found, size = _from_log(source, chosen, tokenizer, slice_by or (chosen.slice_by if chosen else "task"))
            rows = estimate(found, k or [size], correct_at=correct_at)
        else:
            from offbeat.api import evaluate

            with plain_errors(code=2):
                rows = evaluate(
                    source, chosen, prompts=prompts, samples=samples, k=k or (), temperature=temperature,
                    greedy=greedy, before=before, max_tokens=max_tokens, seed=seed, slice_by=slice_by,
                    correct_at=correct_at, workers=workers, chat_template_kwargs=template_variables(chat_template),
                )  # fmt: skip
            typer.echo(f"{rows[0].prompts} distinct {rows[0].origin}")
        _print(rows)


def _from_log(
    uri: str, task: "Task | None", tokenizer: Path | None, column: str | None
) -> "tuple[list[Attempts], int]":
    """Return the attempts at each prompt, over all its groups, and the size of the largest group."""
    from offbeat.evaluation import Attempts
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables
    from offbeat.types import Score

    stored = StoredGroups(LogReader(Tables.open(uri)), uri, task, tokenizer)
    answer = task.answer if task is not None and stored.has_tokenizer else None
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
    if column == "task":
        return group.prompt.task
    return "all" if column is None else str(group.prompt.columns.get(column, f"no {column}"))


def _print(rows: "list[EvaluationRow]") -> None:
    """Print a row per slice, or, if there is a comparison, a row per metric: before, after, difference."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    Console(width=width).print(_compared(rows) if rows[0].before else _by_slice(rows))
    typer.echo("means over prompts, with 95 % intervals over prompts in brackets; unscorable completions do not count")


def _by_slice(rows: "list[EvaluationRow]") -> "Table":
    from rich.table import Table

    metrics = list(dict.fromkeys(metric for row in rows for metric in row.estimates))
    table = Table("slice", "prompts", "completions", "unscorable", *metrics)
    for row in rows:
        counts = [str(row.prompts), str(row.completions), str(row.unscorable)]
        cells = [str(row.estimates[metric]) if metric in row.estimates else "–" for metric in metrics]
        table.add_row(printable(row.slice), *counts, *cells)
    return table


def _compared(rows: "list[EvaluationRow]") -> "Table":
    """Fits into 80 columns, intervals included."""
    from rich.table import Table

    table = Table("slice", "metric", "before", "after", "difference")
    for row in rows:
        counts = {"prompts": row.prompts, "completions": row.completions, "unscorable": row.unscorable}
        lines = [(name, ["", str(count), ""]) for name, count in counts.items()]
        for metric in row.estimates:
            shown = (row.before, row.estimates, row.difference)
            lines.append((metric, [str(one[metric]) if metric in one else "–" for one in shown]))
        for number, (name, cells) in enumerate(lines):
            table.add_row("" if number else printable(row.slice), name, *cells, end_section=number == len(lines) - 1)
    return table
