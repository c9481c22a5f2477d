"""`offbeat log`: inspect an experience log. No command here changes it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import load_tokenizer
from offbeat.cli.terminal import plain_errors, printable, require_log

if TYPE_CHECKING:
    from offbeat.experience.ledger import GroupTotals
    from offbeat.experience.reader import LogReader
    from offbeat.types import Completion, Group

log = typer.Typer(help="Inspect an experience log.", no_args_is_help=True)

LogUri = Annotated[str, typer.Argument(metavar="LOG", help="The experience log: a path or an object store URI")]
MAX_TOKENS = 64
"""Token ids shown of a completion if there is no tokenizer."""


@contextmanager
def _open_log(uri: str) -> "Iterator[LogReader]":
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables

    require_log(uri)
    with plain_errors():
        yield LogReader(Tables.open(uri))


@log.command()
def stats(uri: LogUri) -> None:
    """Count the groups, completions and tokens in a log: `offbeat log stats runs/one/experience`."""
    with _open_log(uri) as reader:
        found = reader.stats()
    size = "unknown" if found.bytes_on_disk is None else f"{found.bytes_on_disk / 1e6:.1f} MB"
    typer.echo(f"{found.all}")
    typer.echo(f"{found.tokens} tokens, {size} on disk, {found.late_scores} late scores")
    unscored = found.all.completions - found.all.scored
    typer.echo(f"{unscored} completions without a reward; {found.unripe} groups wait for feedback")
    _print_totals("task", found.tasks)
    _print_totals("source", found.sources)
    _print_totals("oldest version", found.versions)
    typer.echo(f"quarantined: {sum(found.quarantined.values())}")
    for reason, count in found.quarantined.items():
        typer.echo(f"  {printable(reason)}: {count}")


def _print_totals(by: str, totals: "Mapping[str, GroupTotals]") -> None:
    typer.echo(f"by {by}:")
    for name, total in totals.items():
        typer.echo(f"  {printable(name)}: {total}")


@log.command()
def fates(uri: LogUri) -> None:
    """Count groups by fate, and fail if the ledger does not balance: `offbeat log fates runs/one/experience`."""
    from offbeat.errors import ConservationError

    with _open_log(uri) as reader:
        ledger = reader.ledger()
    typer.echo(str(ledger))
    typer.echo(f"{ledger.uses} uses in training, including replays")
    typer.echo(f"{ledger.repeated} repeated rows ignored, {ledger.conflicts} of them with different content")
    try:
        ledger.check()
    except ConservationError as error:
        typer.echo(printable(f"the ledger does not balance: {error}"), err=True)
        raise typer.Exit(1) from error


@log.command()
def show(
    uri: LogUri,
    group: Annotated[str | None, typer.Argument(help="The id of a group; default: the first groups")] = None,
    first: Annotated[int, typer.Option(help="How many groups to show if no id is given")] = 3,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of a tokenizer, to show text")] = None,
) -> None:
    """Show groups as text: `offbeat log show runs/one/experience --first 1 --tokenizer my-model`."""
    loaded = load_tokenizer(tokenizer) if tokenizer else None

    def decode(token_ids: list[int]) -> str:
        if loaded is not None:
            return str(loaded.decode(token_ids, skip_special_tokens=False))
        more = f" … {len(token_ids) - MAX_TOKENS} more" if len(token_ids) > MAX_TOKENS else ""
        return " ".join(map(str, token_ids[:MAX_TOKENS])) + more

    with _open_log(uri) as reader:
        for one in reader.read([group]) if group else islice(reader.groups(at_once=max(1, first)), first):
            _print_group(one, _fate(reader, one.id), decode)


def _fate(reader: "LogReader", group_id: str) -> str:
    from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, settle
    from offbeat.reports.groups import describe_fate

    columns = ["group_id", "event", "step", "cause", "by"]
    quoted = group_id.replace("'", "''")
    rows = reader.tables.events.scan(
        0, reader.snapshot().events, columns, f"group_id = '{quoted}' OR event = '{LedgerEventKind.REWOUND}'"
    )
    events = [
        LedgerEvent(name, LedgerEventKind(event), step, cause, by)
        for name, event, step, cause, by in zip(*(rows[column].to_pylist() for column in columns), strict=True)
    ]
    return describe_fate(settle([group_id], events).fates[group_id])


def _print_group(group: "Group", fate: str, decode: Callable[[list[int]], str]) -> None:
    prompt = group.prompt
    typer.echo(printable(f"group {group.id}  task {prompt.task}  prompt {prompt.id}  {fate}"))
    typer.echo(_indent(decode(prompt.token_ids.tolist())))
    for name, value in prompt.columns.items():
        typer.echo(_indent(f"{name} = {value}"))
    for completion in group.completions:
        typer.echo(printable(f"  {completion.id}  {_describe(completion)}"))
        typer.echo(_indent(decode(completion.token_ids.tolist()), "      "))


def _describe(completion: "Completion") -> str:
    from offbeat.reports.groups import describe_score
    from offbeat.types import UNKNOWN, Score

    score = ("reward " if isinstance(completion.score, Score) else "") + describe_score(completion.score)
    spans = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in completion.versions)
    logprobs = completion.behavior_logprobs
    known = "log-probs unknown" if logprobs is UNKNOWN else f"mean log-prob {logprobs.mean():.3f}"
    length = f"{len(completion.token_ids)} tokens, {completion.finish}"
    return "  ".join(filter(None, [score, completion.source, spans, length, known]))


def _indent(text: str, margin: str = "    ") -> str:
    return "\n".join(margin + line for line in printable(text).split("\n"))


@log.command()
def export(
    uri: LogUri,
    file: Annotated[Path, typer.Argument(help="The file to write, .jsonl or .parquet; must not exist yet")],
) -> None:
    """Write one row per completion, with late scores applied: `offbeat log export runs/one/experience groups.parquet`.

    `offbeat import` reads this file without further options and creates the same groups.
    """
    from offbeat.experience.importing.rows_out import export as write

    with _open_log(uri) as reader:
        count = write(reader.groups(), file)
    typer.echo(f"{count} groups written to {file}")
