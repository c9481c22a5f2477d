"""`offbeat score`: score stored completions again and show what changes."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.log_options import LogOrRun, find_log
from offbeat.cli.task_option import Settings, StoredGroups, TaskName, TokenizerDirectory, Workers, make_task
from offbeat.cli.terminal import plain_errors, printable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from offbeat.experience.log import ExperienceLog
    from offbeat.scoring.pool import Outcome, ScoringPool
    from offbeat.types import Completion, Group

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
    outcomes = future.result(timeout=600.0)  # the pool's own deadlines are much shorter
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
