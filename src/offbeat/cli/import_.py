"""`offbeat import`: add existing rollouts to an experience log."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.log_options import RefusedFile, locate_log, parse_range, write_refusals
from offbeat.cli.task_option import TemplateVariables, load_tokenizer, stored_task_name, template_variables
from offbeat.cli.terminal import has_log, plain_errors, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offbeat.experience.importing.importer import ImportTally
    from offbeat.experience.importing.shapes import Encoder


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
    with plain_errors():
        records = find_records(file, split)
        layout = layout_of(records, parse_columns(columns), [column for column in keep.split(",") if column])
        typer.echo(printable(f"detected: {layout}"))
        if name is None and not (layout.shape is RowShape.EXPORT or "task" in layout.columns):
            name = Path(file).name.partition(".")[0]
            typer.echo(
                printable(f"  the groups are named after the file, as those of task {name}; --task names another")
            )
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
            tally = import_into(
                log, found, rules=rules, dry_run=dry_run, on_batch=_show_progress, on_refusal=on_refusal
            )
    typer.echo(printable(str(tally)))
    if tally.awaited and not dry_run:
        typer.echo(printable(f"to see what waits for a score: offbeat log pending {into}"))
    if dry_run:
        typer.echo("dry run: nothing was written")
    if (refusals := sum(tally.refused.values())) > tally.taken + tally.present:
        typer.echo(f"most of {file} was refused: {refusals} groups; fix what the reasons above say", err=True)
        raise typer.Exit(1)


def _show_progress(tally: "ImportTally") -> None:
    """Print a progress line that is overwritten in place, if stderr is a terminal."""
    if sys.stderr.isatty():
        typer.echo(f"\r{tally.taken} groups imported, {sum(tally.refused.values())} quarantined ", nl=False, err=True)


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
    from offbeat.rollout.stopping import read_generation_config, stop_tokens

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

    try:
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
