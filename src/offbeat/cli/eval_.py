"""The rewards of a task, asked: `offbeat eval` makes a table of pass rates, `offbeat score` grades stored answers."""

import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from offbeat.cli.options import (
    LogOrRun,
    Settings,
    StoredGroups,
    TaskName,
    TemplateVariables,
    TokenizerDirectory,
    Workers,
    find_log,
    make_task,
    template_variables,
)
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rich.table import Table

    from offbeat.evaluation import Attempts, EvaluationRow
    from offbeat.experience.log import ExperienceLog
    from offbeat.scoring.pool import Outcome, ScoringPool
    from offbeat.tasks.task import Task
    from offbeat.types import Completion, Group

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
    from offbeat.evaluation import Attempts, counted
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables

    stored = StoredGroups(LogReader(Tables.open(uri)), uri, task, tokenizer)
    answer = task.answer if task is not None and stored.has_tokenizer else None
    rewards: dict[tuple[str, str], list[float | None]] = {}
    answers: dict[tuple[str, str], list[str | None]] = {}
    largest = 0
    for group in stored.groups():
        key = group.prompt.id, _slice(group, column)
        given = [counted(c.score) for c in group.completions]
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
    typer.echo(
        "means over prompts; in brackets 95 % intervals, which hold unscorable completions as wrong and as right"
    )


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


MAX_IN_POOL = 64
"""Groups in the scoring pool at a time."""
MAX_PRINTED = 8
"""Changed completions that are printed."""


@dataclass
class ScoreChanges:
    """Counts of completions by score before and after, and the completions whose score changes."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of completions by (before, after)."""
    differing: "list[tuple[Group, Completion, Outcome]]" = field(default_factory=list)

    def add(self, group: "Group", completion: "Completion", now: "Outcome") -> None:
        self.counts[_label(completion.score), _label(now)] += 1
        if _label(completion.score) != _label(now):
            self.differing.append((group, completion, now))


def score(
    log: LogOrRun,
    task: TaskName,
    settings: Settings = None,
    tokenizer: TokenizerDirectory = None,
    write: Annotated[bool, typer.Option("--write", help="Append the changed scores to the log as late scores")] = False,
    max_failures: Annotated[
        float, typer.Option(min=0, max=1, help="Stop if more than this share cannot be scored")
    ] = 0.25,
    workers: Workers = 2,
) -> None:
    """Score stored completions again and show what changes: `offbeat score runs/one --task gsm8k`.

    With --write the new scores are appended as late feedback: they replace the earlier ones, which stay in the log.

    A completion that has a score but cannot be scored now keeps its score.
    """
    from offbeat.experience.log import ExperienceLog
    from offbeat.scoring.pool import ScoringPool
    from offbeat.scoring.tally import FailureLimit

    chosen = make_task(task, settings)
    place = find_log(log)
    changes = ScoreChanges()
    with plain_errors(), ExperienceLog.open(place.uri) as opened:
        stored = StoredGroups(opened, place.uri, chosen, tokenizer or place.tokenizer)
        with ScoringPool.of(chosen, workers=workers, limit=FailureLimit(share=max_failures)) as pool:
            for group, completion, now in _score_all(stored, pool):
                changes.add(group, completion, now)
            pool_report = pool.report()
        _print_changes(changes)
        if failing := [entry for entry in pool_report.failing if entry.why][-3:]:
            typer.echo("scoring failed, for instance:\n" + "\n".join(printable(f"  {entry}") for entry in failing))
        slowest = pool_report.slowest[:3]
        typer.echo("slowest:\n" + "\n".join(printable(f"  {entry}") for entry in slowest))
        if write:
            typer.echo(f"{_append(opened, changes, chosen.name)} late scores appended")
        elif changes.differing:
            typer.echo("nothing was written; --write appends the changed scores")


def _score_all(stored: StoredGroups, pool: "ScoringPool") -> "Iterator[tuple[Group, Completion, Outcome]]":
    """Yield every completion with its new outcome, in stored order."""
    from offbeat.tasks.rewards import Answers

    pending: deque[tuple[Group, Future[list[Outcome]]]] = deque()
    for group in stored.groups():
        texts, ids = zip(*((stored.text(one), one.token_ids.tolist()) for one in group.completions), strict=True)
        answers = Answers(texts, group.prompt.columns, ids, group.oldest_version or 0)
        pending.append((group, pool.score_group(answers, [one.id for one in group.completions])))
        if len(pending) > MAX_IN_POOL:
            yield from _wait(*pending.popleft())
    while pending:
        yield from _wait(*pending.popleft())


def _wait(group: "Group", future: "Future[list[Outcome]]") -> "Iterator[tuple[Group, Completion, Outcome]]":
    outcomes = future.result()  # the pool ends every completion
    yield from ((group, *pair) for pair in zip(group.completions, outcomes, strict=True))


def _label(outcome: "Outcome | None") -> str:
    from offbeat.types import Unscorable

    if outcome is None:
        return "waiting"
    return f"unscorable ({outcome.reason})" if isinstance(outcome, Unscorable) else f"{outcome.reward:.6g}"


def _print_changes(changes: ScoreChanges) -> None:
    from rich.console import Console
    from rich.table import Table

    from offbeat.types import Unscorable

    table = Table("before", "after", "completions")
    for (before, after), count in sorted(changes.counts.items()):
        if before != after:
            table.add_row(before, after, str(count))
    same = sum(count for (before, after), count in changes.counts.items() if before == after)
    table.add_row("unchanged", "", str(same))
    Console().print(table)
    for group, completion, now in changes.differing[:MAX_PRINTED]:
        why = f" ({now.detail})" if isinstance(now, Unscorable) else ""
        typer.echo(printable(f"  {group.id} {completion.id}: {_label(completion.score)} → {_label(now)}{why}"))
    if len(changes.differing) > MAX_PRINTED:
        typer.echo(f"  … and {len(changes.differing) - MAX_PRINTED} more")


def _append(log: "ExperienceLog", changes: ScoreChanges, scorer: str) -> int:
    from offbeat.experience.feedback import LateScore
    from offbeat.types import Score

    late = [
        LateScore(group.id, completion.id, now, scorer=f"offbeat score: {scorer}")
        for group, completion, now in changes.differing
        if isinstance(now, Score) or completion.score is None
    ]
    return len(log.score(late).accepted)
