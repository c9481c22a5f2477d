"""The experience log on the command line: `offbeat import` and `feedback` add to it, `offbeat log` looks at it."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.options import (
    LogOrRun,
    LogPlace,
    RefusedFile,
    TemplateVariables,
    find_log,
    load_tokenizer,
    locate_log,
    parse_range,
    stored_task_name,
    template_variables,
    write_refusals,
)
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.feedback import PendingCompletion
    from offbeat.experience.importing.importer import ImportTally
    from offbeat.experience.importing.records import BrokenRecord, SourceRecord
    from offbeat.experience.importing.shapes import Encoder
    from offbeat.experience.index import GroupTotals
    from offbeat.experience.reader import LogReader
    from offbeat.experience.score_join import FeedbackTally
    from offbeat.experience.validation import ValidationRules
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
    rules = _rules(place.uri, limits)
    join = ScoreJoin(parse_columns(columns, FEEDBACK_ROLES), scorer, replace, rules)
    records = _read(scores)
    with ExperienceLog.open(place.uri, rules=rules) as log, write_refusals(refused) as on_refusal:
        tally = join.run(log, records, on_batch=_show_scores, on_refusal=on_refusal)
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


def _show_scores(tally: "FeedbackTally") -> None:
    _show_progress(f"{tally.lines} lines, {sum(tally.refused.values())} refused")


def _show_progress(text: str) -> None:
    """Print a line that the next one overwrites, if stderr is a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r{text} ", nl=False, err=True)


def import_(
    file: Annotated[str, typer.Argument(help="JSONL, Parquet, a saved dataset, a directory, or hf:owner/name")],
    into: Annotated[str, typer.Option(help="The experience log (a path or an object store URI), or a run directory")],
    task: Annotated[
        str | None, typer.Option(help="The task of the prompts, a name or your task file; default: the file's name")
    ] = None,
    source: Annotated[str | None, typer.Option(help="The author, for example: human, model:qwen")] = None,
    columns: Annotated[str, typer.Option(help="Names of columns: prompt=question,completion_id=ticket")] = "",
    keep: Annotated[str, typer.Option(help="Columns to store with the prompt: answer,difficulty")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the tokenizer; required for text")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to prompts that are text")] = False,
    chat_template: TemplateVariables = None,
    reward_range: Annotated[str | None, typer.Option(help="Refuse rewards outside of this range: 0,1")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Refuse token ids that are not below this number")] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset")] = "train",
    refused: RefusedFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be imported, and write nothing")] = False,
) -> None:
    """Import rollouts: `offbeat import rollouts.jsonl --into experience --task math --source human --tokenizer model`.

    The completions can come from any model or person. Your own ids are kept, and completions without a reward wait for
    `offbeat feedback`. Importing the same file again adds nothing. Use `--dry-run` first to see what would be imported.

    Columns are found by name: prompt, question, query, problem, instruction, input, prompt_ids · response, completion,
    output, generation, completion_ids, also in the plural for a list, candidates, samples, answers · reward, score,
    rewards, scores · logprobs, log_probs, behavior_logprobs · finish_reason, finish · messages, conversations for a
    whole conversation · group_id, prompt_id, completion_id, id, uid. For other names: `--columns prompt=ask`.

    It fails if most of the groups are refused.
    """
    from contextlib import nullcontext

    from offbeat.experience.importing.importer import import_into, layout_of, read_groups
    from offbeat.experience.importing.layout import RowShape, parse_columns
    from offbeat.experience.importing.records import find_records
    from offbeat.experience.importing.shapes import ImportDefaults
    from offbeat.experience.log import ExperienceLog
    from offbeat.experience.validation import ValidationRules

    name, limits, place = task and stored_task_name(task), parse_range(reward_range), locate_log(into)
    records = find_records(file, split)
    layout = layout_of(records, parse_columns(columns), [column for column in keep.split(",") if column])
    typer.echo(printable(f"detected: {layout}"))
    if name is None and not (layout.shape is RowShape.EXPORT or "task" in layout.columns):
        name = Path(file).name.partition(".")[0]
        typer.echo(printable(f"  the groups are named after the file, as those of task {name}; --task names another"))
    if limits and name is None:
        raise typer.BadParameter("--reward-range applies to one task; give its name with --task")
    encoder = None
    if tokenizer:
        loaded = load_tokenizer(tokenizer, template_variables(chat_template))
        in_messages = "messages" in layout.kinds.values()
        encoder = _make_encoder(tokenizer, loaded, chat=chat, in_messages=in_messages)
        vocab_size = vocab_size or len(loaded)
    rules = ValidationRules(vocab_size, {name: limits} if name and limits else {})
    found = read_groups(records, layout, ImportDefaults(name, source, encoder))
    opened = nullcontext() if dry_run and not has_log(place.uri) else ExperienceLog.open(place.uri, rules=rules)
    with opened as log, write_refusals(refused) as on_refusal:
        tally = import_into(log, found, rules=rules, dry_run=dry_run, on_batch=_show_groups, on_refusal=on_refusal)
    typer.echo(printable(str(tally)))
    if tally.awaited and not dry_run:
        typer.echo(printable(f"to see what waits for a score: offbeat log pending {into}"))
    if dry_run:
        typer.echo("dry run: nothing was written")
    if (refusals := sum(tally.refused.values())) > tally.taken + tally.present:
        typer.echo(f"most of {file} was refused: {refusals} groups; fix what the reasons above say", err=True)
        raise typer.Exit(1)


def _show_groups(tally: "ImportTally") -> None:
    _show_progress(f"{tally.taken} groups imported, {sum(tally.refused.values())} quarantined")


def _make_encoder(directory: Path, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, in_messages: bool) -> "Encoder":
    """Return the encoder for an import.

    Args:
        directory: Where the tokenizer is. A generation config beside it may name more stop tokens.
        chat: A text prompt becomes a user message in the chat template.
        in_messages: Prompts are messages. In a chat, the template's stop token ends an answer.
    """
    from offbeat.experience.importing.shapes import Encoder

    if chat and not tokenizer.chat_template:
        raise typer.BadParameter("--chat was given, but the tokenizer has no chat template")
    check, stops = _unknown_token_check(tokenizer), _stop_tokens(directory, tokenizer)

    def encode(text: str) -> list[int]:
        return check(text, tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(messages: list[dict[str, str]]) -> list[int]:
        return check("".join(message["content"] for message in messages), _apply_template(tokenizer, messages))

    def encode_prompt(text: str) -> list[int]:
        return encode_chat([{"role": "user", "content": text}]) if chat else check(text, tokenizer.encode(text))

    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(stops), None)
    if tokenizer.chat_template and (chat or in_messages):
        end = _end_of_turn(tokenizer, stops, end)
    return Encoder(encode, encode_prompt, encode_chat if tokenizer.chat_template else None, end, stops)


def _stop_tokens(directory: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    from offbeat.tasks.tokenizer import read_generation_config, stop_tokens

    is_model = any((directory / name).is_file() for name in ("generation_config.json", "config.json"))
    return stop_tokens(read_generation_config(directory) if is_model else None, tokenizer)


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase", stops: Iterable[int], default: int | None) -> int | None:
    """Return the last stop token that the chat template writes after an answer, or `default` if it writes none."""
    from offbeat.experience.importing.records import UnreadableCell

    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    try:
        written = _apply_template(tokenizer, turn, answered=True)
    except UnreadableCell:
        return default
    return next((token for token in reversed(written) if token in stops), default)


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], *, answered: bool = False
) -> list[int]:
    from jinja2 import TemplateError

    from offbeat.experience.importing.records import UnreadableCell
    from offbeat.tasks.tokenizer import rendering

    try:
        with rendering():
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=not answered, return_dict=False))
    except TemplateError as error:
        raise UnreadableCell(f"the chat template refuses the prompt: {error!s:.120}") from error


def _unknown_token_check(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str, list[int]], list[int]]:
    """Return a function that refuses text with characters that the tokenizer replaces by its unknown or pad token."""
    from offbeat.experience.importing.records import UnreadableCell

    stand_ins = {tokenizer.unk_token_id, tokenizer.pad_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    names = [token for token in (tokenizer.unk_token, tokenizer.pad_token) if token]

    def is_unknown(tokens: list[int]) -> bool:
        return not stand_ins.isdisjoint(tokens)

    def check(text: str, tokens: list[int]) -> list[int]:
        if is_unknown(tokens) and not any(name in text for name in names):
            unknown = next((c for c in text if is_unknown(tokenizer.encode(c, add_special_tokens=False))), text)
            raise UnreadableCell(f"the tokenizer has no token for {unknown!r:.80} in {text!r:.80}")
        return tokens

    return check
