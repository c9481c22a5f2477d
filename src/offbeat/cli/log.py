"""`offbeat log`: inspect an experience log. No command here changes it."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.log_options import LogOrRun, LogPlace, find_log
from offbeat.cli.task_option import load_tokenizer
from offbeat.cli.terminal import plain_errors, printable

if TYPE_CHECKING:
    from offbeat.experience.feedback import PendingCompletion
    from offbeat.experience.index import GroupTotals
    from offbeat.experience.reader import LogReader
    from offbeat.types import Completion, Group

log = typer.Typer(help="Inspect an experience log.", no_args_is_help=True)

Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="Directory of a tokenizer, to show text; default: the run's")
]
MAX_TOKENS = 64
"""Token ids shown of a completion if there is no tokenizer."""
MAX_PROMPT = 60
"""Characters of a prompt in the table of `offbeat log pending`."""


@contextmanager
def _open_log(where: str | LogPlace) -> "Iterator[LogReader]":
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables

    place = find_log(where) if isinstance(where, str) else where
    with plain_errors():
        yield LogReader(Tables.open(place.uri))


@log.command()
def stats(log_or_run: LogOrRun) -> None:
    """Count the groups, completions and tokens in a log: `offbeat log stats runs/one`."""
    with _open_log(log_or_run) as reader:
        found, used = reader.stats(), reader.uses()
    size = "unknown" if found.bytes_on_disk is None else f"{found.bytes_on_disk / 1e6:.1f} MB"
    typer.echo(f"{found.all}")
    typer.echo(f"{found.tokens} tokens, {size} on disk, {found.late_scores} late scores")
    unscored = found.all.completions - found.all.scored
    typer.echo(f"{unscored} completions without a reward; {found.unripe} groups wait for feedback")
    _print_totals("task", found.tasks)
    _print_totals("source", found.sources)
    _print_totals("oldest version", found.versions)
    typer.echo(f"trained on: {used.all}")
    for several in (used.trainers, used.tasks):
        for name, counts in several.items() if len(several) > 1 else ():
            typer.echo(f"  {printable(name)}: {counts}")
    typer.echo(f"quarantined: {sum(found.quarantined.values())}")
    for reason, count in found.quarantined.items():
        typer.echo(f"  {printable(reason)}: {count}")


def _print_totals(by: str, totals: "Mapping[str, GroupTotals]") -> None:
    typer.echo(f"by {by}:")
    for name, total in totals.items():
        typer.echo(f"  {printable(name)}: {total}")


@log.command()
def fates(log_or_run: LogOrRun) -> None:
    """Count groups by fate, and fail if the ledger does not balance: `offbeat log fates runs/one`."""
    from offbeat.errors import ConservationError

    with _open_log(log_or_run) as reader:
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
    log_or_run: LogOrRun,
    group: Annotated[str | None, typer.Argument(help="The id of a group; default: the first groups")] = None,
    first: Annotated[int, typer.Option(help="How many groups to show if no id is given")] = 3,
    tokenizer: Tokenizer = None,
) -> None:
    """Show groups as text: `offbeat log show runs/one --first 1 --tokenizer my-model`."""
    place = find_log(log_or_run)
    decode = _decoder(tokenizer or place.tokenizer, special=True)
    with _open_log(place) as reader:
        for one in reader.read([group]) if group else islice(reader.groups(at_once=max(1, first)), first):
            _print_group(one, _fate(reader, one.id), decode)


def _decoder(tokenizer: Path | None, *, special: bool) -> Callable[[list[int]], str]:
    """Return a function from token ids to text; without a tokenizer it prints the first ids."""
    loaded = load_tokenizer(tokenizer) if tokenizer else None

    def decode(token_ids: list[int]) -> str:
        if loaded is not None:
            return str(loaded.decode(token_ids, skip_special_tokens=not special))
        more = f" … {len(token_ids) - MAX_TOKENS} more" if len(token_ids) > MAX_TOKENS else ""
        return " ".join(map(str, token_ids[:MAX_TOKENS])) + more

    return decode


@log.command()
def pending(
    log_or_run: LogOrRun,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Print all of them as JSONL, for `offbeat feedback`")] = False,
    first: Annotated[int, typer.Option(min=1, help="How many rows of the table to show")] = 20,
    tokenizer: Tokenizer = None,
) -> None:
    """List the completions that wait for a score: `offbeat log pending runs/one`.

    With `--jsonl`, fill in `score` on each line and send the lines back:
    `offbeat log pending runs/one --jsonl | ./annotate | offbeat feedback runs/one -`. A line whose score stays null is
    left waiting.
    """
    place = find_log(log_or_run)
    directory = tokenizer or place.tokenizer
    decode = _decoder(directory, special=False)
    with _open_log(place) as reader:
        if jsonl:
            for one in reader.pending():
                typer.echo(json.dumps(_pending_row(one, decode if directory else None)))
        else:
            _print_pending(reader.pending(), decode, first)


def _pending_row(one: "PendingCompletion", decode: Callable[[list[int]], str] | None) -> dict[str, object]:
    prompt, completion = one.group.prompt.token_ids.tolist(), one.completion.token_ids.tolist()
    texts = {"prompt": decode(prompt), "completion": decode(completion)} if decode else {}
    return {
        "group_id": one.group.id,
        "completion_id": one.completion.id,
        "prompt_id": one.group.prompt.id,
        "task": one.group.prompt.task,
        "source": one.completion.source,
        "age_seconds": round(time.time() - one.appended_at),
        **(texts or {"prompt_token_ids": prompt, "token_ids": completion}),
        "score": None,
    }


def _print_pending(found: "Iterator[PendingCompletion]", decode: Callable[[list[int]], str], first: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("group", "completion", "age", "prompt")
    for one in islice(found, first):
        prompt = decode(one.group.prompt.token_ids.tolist())
        start = prompt if len(prompt) <= MAX_PROMPT else prompt[:MAX_PROMPT] + "…"
        cells = (one.group.id, one.completion.id, _age(time.time() - one.appended_at), start.replace("\n", " "))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    more = sum(1 for _ in found)
    if table.row_count:
        Console().print(table)
    typer.echo(f"{table.row_count + more} completions wait for a score" + (f"; {more} are not shown" if more else ""))


def _age(seconds: float) -> str:
    """Return a time span in its largest unit.

    >>> _age(40), _age(7_300), _age(400_000)
    ('40 s', '2 h', '4 d')
    """
    size, unit = next((pair for pair in ((86_400, "d"), (3_600, "h"), (60, "min")) if seconds >= pair[0]), (1, "s"))
    return f"{int(seconds // size)} {unit}"


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
    log_or_run: LogOrRun,
    file: Annotated[Path, typer.Argument(help="The file to write, .jsonl or .parquet; must not exist yet")],
    tokenizer: Tokenizer = None,
) -> None:
    """Write one row per completion, with text and late scores: `offbeat log export runs/one groups.parquet`.

    `offbeat import` reads this file without further options and creates the same groups.
    """
    from offbeat.experience.importing.rows_out import export as write
    from offbeat.tasks.tokenizer import in_words

    place = find_log(log_or_run)
    directory = tokenizer or place.tokenizer
    loaded = load_tokenizer(directory) if directory else None
    with _open_log(place) as reader:
        count = write((in_words(one, loaded) if loaded else one for one in reader.groups()), file)
    typer.echo(f"{count} groups written to {file}{'' if loaded else ' as token ids; for text too, give --tokenizer'}")
