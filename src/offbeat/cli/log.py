"""`offbeat log`: look into an experience log. Nothing here changes one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.task_option import load_tokenizer
from offbeat.cli.terminal import plain_errors, printable, require_log

if TYPE_CHECKING:
    from offbeat.experience.reader import LogReader
    from offbeat.experience.stats import Share
    from offbeat.types import Completion, Group

log = typer.Typer(help="Look into an experience log.", no_args_is_help=True)

Where = Annotated[str, typer.Argument(metavar="LOG", help="A path or an object store's URI")]
SHOWN = 64
"""Token ids shown of a completion, where there is no tokenizer."""


@contextmanager
def _reading(uri: str) -> "Iterator[LogReader]":
    from offbeat.experience.reader import LogReader
    from offbeat.experience.schema import Tables

    require_log(uri)
    with plain_errors():
        yield LogReader(Tables.open(uri))


@log.command()
def stats(place: Where) -> None:
    """What a log holds, in numbers: `offbeat log stats runs/one/experience`."""
    from offbeat.experience.stats import stats_of

    with _reading(place) as reader:
        found = stats_of(reader)
    size = "unknown" if found.bytes_on_disk is None else f"{found.bytes_on_disk / 1e6:.1f} MB"
    typer.echo(f"{found.all}")
    typer.echo(f"{found.tokens} tokens, {size} on disk, {found.late_scores} late scores")
    typer.echo(f"{found.all.completions - found.all.scored} completions without a reward; {found.unripe} groups unripe")
    _shares("task", found.tasks)
    _shares("source", found.sources)
    _shares("oldest version", found.versions)
    typer.echo(f"quarantined: {sum(found.quarantined.values())}")
    for reason, count in found.quarantined.items():
        typer.echo(f"  {printable(reason)}: {count}")


def _shares(by: str, shares: "Mapping[str, Share]") -> None:
    typer.echo(f"by {by}:")
    for name, share in shares.items():
        typer.echo(f"  {printable(name)}: {share}")


@log.command()
def fates(place: Where) -> None:
    """What became of every group; fails if one is unaccounted for: `offbeat log fates runs/one/experience`."""
    from offbeat.errors import ConservationError

    with _reading(place) as reader:
        ledger = reader.ledger()
    typer.echo(str(ledger))
    typer.echo(f"trained on {ledger.uses} times in all, replays included")
    typer.echo(f"{ledger.repeated} repeated rows left out, {ledger.conflicts} of them with other content")
    try:
        ledger.check()
    except ConservationError as error:
        typer.echo(printable(f"the books do not balance: {error}"), err=True)
        raise typer.Exit(1) from error


@log.command()
def show(
    place: Where,
    group: Annotated[str | None, typer.Argument(help="A group's id; left out, the first few are shown")] = None,
    first: Annotated[int, typer.Option(help="How many, where no id is given")] = 3,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of a tokenizer, to show text")] = None,
) -> None:
    """Groups for people to read: `offbeat log show runs/one/experience --first 1 --tokenizer my-model`."""
    loaded = load_tokenizer(tokenizer) if tokenizer else None

    def words(token_ids: list[int]) -> str:
        if loaded is not None:
            return str(loaded.decode(token_ids, skip_special_tokens=False))
        more = f" … {len(token_ids) - SHOWN} more" if len(token_ids) > SHOWN else ""
        return " ".join(map(str, token_ids[:SHOWN])) + more

    with _reading(place) as reader:
        for one in reader.read([group]) if group else islice(reader.groups(at_once=max(1, first)), first):
            _show(one, _fate(reader, one.id), words)


def _fate(reader: "LogReader", group_id: str) -> str:
    from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, settle

    columns = ["group_id", "event", "step", "cause", "by"]
    named = group_id.replace("'", "''")
    rows = reader.tables.events.scan(
        0, reader.snapshot().events, columns, f"group_id = '{named}' OR event = '{LedgerEventKind.REWOUND}'"
    )
    events = [
        LedgerEvent(name, LedgerEventKind(event), step, cause, by)
        for name, event, step, cause, by in zip(*(rows[column].to_pylist() for column in columns), strict=True)
    ]
    fate = settle([group_id], events).fates[group_id]
    steps = f" at steps {', '.join(map(str, fate.steps))}" if fate.steps else ""
    return f"{fate.fate.value}{steps}" + (f" ({fate.cause})" if fate.cause else "")


def _show(group: "Group", fate: str, words: Callable[[list[int]], str]) -> None:
    prompt = group.prompt
    typer.echo(printable(f"group {group.id}  task {prompt.task}  prompt {prompt.id}  {fate}"))
    typer.echo(_indented(words(prompt.token_ids.tolist())))
    for name, value in prompt.columns.items():
        typer.echo(_indented(f"{name} = {value}"))
    for completion in group.completions:
        typer.echo(printable(f"  {completion.id}  {_facts(completion)}"))
        typer.echo(_indented(words(completion.token_ids.tolist()), "      "))


def _facts(completion: "Completion") -> str:
    from offbeat.types import UNKNOWN, Score, Unscorable

    match completion.score:
        case Score(reward, breakdown):
            parts = ", ".join(f"{name} {part:g}" for name, part in breakdown.items())
            score = f"reward {reward:g}" + (f" ({parts})" if parts else "")
        case Unscorable(reason, detail):
            score = f"unscorable: {reason} {detail}".rstrip()
        case None:
            score = "feedback awaited"
    spans = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in completion.versions)
    logprobs = completion.behavior_logprobs
    known = "log-probs unknown" if logprobs is UNKNOWN else f"mean log-prob {logprobs.mean():.3f}"
    length = f"{len(completion.token_ids)} tokens, {completion.finish}"
    return "  ".join(filter(None, [score, completion.source, spans, length, known]))


def _indented(text: str, margin: str = "    ") -> str:
    return "\n".join(margin + line for line in printable(text).split("\n"))


@log.command()
def export(
    place: Where,
    file: Annotated[Path, typer.Argument(help="A new file: .jsonl or .parquet")],
) -> None:
    """One row per completion, late scores in place: `offbeat log export runs/one/experience groups.parquet`.

    `offbeat import` takes the file as it is and gives the same groups.
    """
    from offbeat.experience.importing.rows_out import export as write

    with _reading(place) as reader:
        count = write(reader.groups(), file)
    typer.echo(f"{count} groups written to {file}")
