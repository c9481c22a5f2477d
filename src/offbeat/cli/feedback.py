"""`offbeat feedback`: join scores that arrive later to the completions that wait for them."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.log_options import LogOrRun, RefusedFile, find_log, parse_range, write_refusals
from offbeat.cli.terminal import plain_errors, printable

if TYPE_CHECKING:
    from offbeat.experience.importing.records import BrokenRecord, SourceRecord
    from offbeat.experience.score_join import FeedbackTally
    from offbeat.experience.validation import ValidationRules


def feedback(
    log_or_run: LogOrRun,
    scores: Annotated[str, typer.Argument(help="JSONL (also .gz) or Parquet with one score a row; - reads a pipe")],
    columns: Annotated[
        str,
        typer.Option(help="Names of columns: completion_id=ticket,reward=stars; others: group, prompt_id, scorer"),
    ] = "",
    scorer: Annotated[str, typer.Option(help="The person or program that gave the scores")] = "",
    reward_range: Annotated[str | None, typer.Option(help="Refuse scores outside of this range: 0,1")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="If a completion has another score, let the new one count")
    ] = False,
    refused: RefusedFile = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any line is refused")] = False,
) -> None:
    """Add scores by id, from a file or a pipe, any number of times: `offbeat feedback runs/one scores.jsonl`.

    A line has the id of a completion and its score: `{"completion_id": "a17", "score": 1}`. The ids are your own if
    you imported them, and `offbeat log pending` lists them. A score that the log already has counts as known; another
    score for the same completion is refused. Refused lines are counted by reason, and all other lines go in.

    The exit code is 0 if at least one line fits the log, and 1 if none does. `--strict` makes it 1 for any refusal.
    """
    from offbeat.experience.importing.layout import parse_columns
    from offbeat.experience.log import ExperienceLog
    from offbeat.experience.score_join import FEEDBACK_ROLES, ScoreJoin

    place, limits = find_log(log_or_run), parse_range(reward_range)
    with plain_errors():
        rules = _rules(place.uri, limits)
        join = ScoreJoin(parse_columns(columns, FEEDBACK_ROLES), scorer, replace, rules)
        records = _read(scores)
        with ExperienceLog.open(place.uri, rules=rules) as log, write_refusals(refused) as on_refusal:
            tally = join.run(log, records, on_batch=_show_progress, on_refusal=on_refusal)
    typer.echo(printable(str(tally)))
    wrong = sum(tally.refused.values())
    if wrong and (strict or wrong == tally.lines):
        raise typer.Exit(1)


def _rules(uri: str, limits: tuple[float, float] | None) -> "ValidationRules":
    from offbeat.experience.reader import LogReader
    from offbeat.experience.validation import ValidationRules

    if limits is None:
        return ValidationRules()
    reader = LogReader.open(uri)
    reader.size()  # reads the names of the tasks
    return ValidationRules(reward_ranges=dict.fromkeys(reader.tasks, limits))


def _read(scores: str) -> "Iterator[SourceRecord | BrokenRecord]":
    from offbeat.experience.importing.records import find_records, parse_lines

    return parse_lines(sys.stdin.buffer, "stdin") if scores == "-" else find_records(scores).read(None)


def _show_progress(tally: "FeedbackTally") -> None:
    """Print a progress line that is overwritten in place, if stderr is a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r{tally.lines} lines, {sum(tally.refused.values())} refused ", nl=False, err=True)
