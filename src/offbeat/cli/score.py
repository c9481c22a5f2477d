"""`offbeat score`: score stored completions again, and see what changed."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import (
    Settings,
    Stored,
    TaskName,
    TokenizerDirectory,
    Workers,
    make_task,
)
from offbeat.cli.terminal import plain_errors, printable, require_log

if TYPE_CHECKING:
    from concurrent.futures import Future

    from offbeat.experience.log import ExperienceLog
    from offbeat.scoring.pool import Outcome, ScoringPool
    from offbeat.types import Completion, Group

AHEAD = 512
"""Completions in the pool at a time."""
SHOWN = 8
"""Changed completions that are printed."""


@dataclass
class Changes:
    """Completions by what became of their score."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(before, now) → how many."""
    differing: "list[tuple[Group, Completion, Outcome]]" = field(default_factory=list)

    def add(self, group: "Group", completion: "Completion", now: "Outcome") -> None:
        """One completion, scored again."""
        self.counts[_word(completion.score), _word(now)] += 1
        if _word(completion.score) != _word(now):
            self.differing.append((group, completion, now))


def score(
    log: Annotated[str, typer.Argument(metavar="LOG", help="An experience log")],
    task: TaskName,
    settings: Settings = None,
    tokenizer: TokenizerDirectory = None,
    write: Annotated[bool, typer.Option("--write", help="Append what changed as late scores")] = False,
    max_failures: Annotated[float, typer.Option(min=0, max=1, help="Stop above this share without a score")] = 0.25,
    workers: Workers = 2,
) -> None:
    """Score stored completions again and show what changed: `offbeat score runs/one/experience --task gsm8k`.

    With --write the new scores are appended as late feedback: they count from then on, and the first ones stay in the
    log. A completion that had a score and cannot be scored now keeps its score.
    """
    from offbeat.experience.log import ExperienceLog
    from offbeat.scoring.pool import ScoringPool
    from offbeat.scoring.tally import FailureLimit

    chosen = make_task(task, settings)
    require_log(log)
    changes = Changes()
    with plain_errors(), ExperienceLog.open(log) as opened:
        stored = Stored(opened, log, chosen, tokenizer)
        with ScoringPool.of(chosen, workers=workers, limit=FailureLimit(share=max_failures)) as pool:
            for group, completion, now in _again(stored, pool):
                changes.add(group, completion, now)
            slowest = pool.report().slowest[:3]
        _print(changes)
        typer.echo("slowest:\n" + "\n".join(printable(f"  {entry}") for entry in slowest))
        if write:
            typer.echo(f"{_write(opened, changes, chosen.name)} late scores appended")
        elif changes.differing:
            typer.echo("nothing was written; --write appends what changed")


def _again(stored: Stored, pool: "ScoringPool") -> "Iterator[tuple[Group, Completion, Outcome]]":
    """Every completion with its new outcome, in stored order, a bounded number of them in the pool."""
    ahead: deque[tuple[Group, Completion, Future[Outcome]]] = deque()
    for group in stored.groups():
        for completion in group.completions:
            future = pool.score(stored.text(completion), group.prompt.columns, of=completion.id)
            ahead.append((group, completion, future))
            if len(ahead) > AHEAD:
                yield _settled(*ahead.popleft())
    while ahead:
        yield _settled(*ahead.popleft())


def _settled(
    group: "Group", completion: "Completion", future: "Future[Outcome]"
) -> "tuple[Group, Completion, Outcome]":
    return group, completion, future.result(timeout=600.0)  # far beyond what the pool's own deadlines allow


def _word(outcome: "Outcome | None") -> str:
    from offbeat.types import Unscorable

    if outcome is None:
        return "awaited"
    return f"unscorable ({outcome.reason})" if isinstance(outcome, Unscorable) else f"{outcome.reward:.6g}"


def _print(changes: Changes) -> None:
    from rich.console import Console
    from rich.table import Table

    from offbeat.types import Unscorable

    table = Table("before", "now", "completions")
    for (before, after), count in sorted(changes.counts.items()):
        if before != after:
            table.add_row(before, after, str(count))
    same = sum(count for (before, after), count in changes.counts.items() if before == after)
    table.add_row("as before", "unchanged", str(same))
    Console().print(table)
    for group, completion, now in changes.differing[:SHOWN]:
        why = f" ({now.detail})" if isinstance(now, Unscorable) else ""
        typer.echo(printable(f"  {group.id} {completion.id}: {_word(completion.score)} → {_word(now)}{why}"))
    if len(changes.differing) > SHOWN:
        typer.echo(f"  … and {len(changes.differing) - SHOWN} more")


def _write(log: "ExperienceLog", changes: Changes, scorer: str) -> int:
    from offbeat.experience.feedback import LateScore
    from offbeat.types import Score

    late = [
        LateScore(group.id, completion.id, now, scorer=f"offbeat score: {scorer}")
        for group, completion, now in changes.differing
        if isinstance(now, Score) or completion.score is None
    ]
    return len(log.score(late).accepted)
