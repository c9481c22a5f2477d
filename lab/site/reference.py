"""The tables of docs/reference, built from the code: settings, commands, presets, metrics, events, errors, log schema.

`scripts/build_docs.py` puts each table between its markers.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from decimal import Decimal
from itertools import pairwise
from math import inf, isinf
from pathlib import Path
from typing import Final

import pyarrow as pa
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from lab.site.lines import fill, items
from offbeat import errors
from offbeat.cli.init import PLACES, facts, recipes
from offbeat.cli.main import app
from offbeat.config import Config
from offbeat.config.knobs import Knob, knobs
from offbeat.events import EVENTS
from offbeat.experience import schema, validation
from offbeat.experience.validation import RefusalReason
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import ExpWeight, Objective
from offbeat.run.health import DEFAULT_RULES
from tests.fixtures.gsm8k_spellings import SPELLINGS

EVERYWHERE: Final = {"LOG_OR_RUN"}
"""Arguments that the page explains once, at its top."""

REMEDIES: Final = {
    RefusalReason.NOT_A_GROUP: "build the dataclasses of `offbeat.types`",
    RefusalReason.ID: "give every group, prompt and completion its own id",
    RefusalReason.TASK: "name the task",
    RefusalReason.PROMPT_TOKENS: "tokenize the prompt; an empty prompt needs at least a start token",
    RefusalReason.PROMPT_COLUMNS: "convert the columns first; JSON has no NaN",
    RefusalReason.NO_COMPLETIONS: "leave the group out",
    RefusalReason.TOKENS: "include the end token: even an empty completion has one",
    RefusalReason.VOCABULARY: "the ids belong to another model: import text with your tokenizer",
    RefusalReason.LOGPROBS_LENGTH: "count the end token in both lists or in neither; or leave the log-probs out",
    RefusalReason.LOGPROBS: "check the engine that recorded it; or leave the log-probs out",
    RefusalReason.LOSS_MASK: "leave the mask out if every token counts",
    RefusalReason.VERSIONS: "record the spans, or name a source other than `policy`",
    RefusalReason.FINISH: "map it to `stop` or `length`",
    RefusalReason.SOURCE: "name who or what wrote the completion",
    RefusalReason.SCORE: "use `Score`, `Unscorable` or `None`",
    RefusalReason.REWARD: "if scoring failed, use `Unscorable`; if feedback is still to come, use `None`",
    RefusalReason.REWARD_RANGE: "correct the range or the scorer",
    RefusalReason.SIZE: "raise `ValidationRules.max_…` if the size is intended",
    RefusalReason.CONFLICT: "correct scores with late feedback; otherwise use another id",
    RefusalReason.UNKNOWN_GROUP: "append the group first",
    RefusalReason.UNKNOWN_COMPLETION: "look up the ids with `offbeat log show`",
    RefusalReason.AMBIGUOUS: "add the id of the group, or of the completion",
    RefusalReason.UNREADABLE: "correct the file and import it again",
}
"""What to do about each reason; a reason without an entry fails the build."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table.

    >>> print(table(["a", "b"], [["1", "x|y"]]), end="")
    | a | b |
    | --- | --- |
    | 1 | x\\|y |
    """
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def settings() -> str:
    """Every setting, by section of the TOML file."""
    sections: dict[str, list[Knob]] = {}
    for knob in knobs().values():
        sections.setdefault(knob.key.rpartition(".")[0], []).append(knob)
    parts = []
    for name, found in sections.items():
        about = "The top of the file, before any section."
        if name:
            section = Config.model_fields[name].annotation
            about = _capital(inspect.getdoc(section).partition(": ")[2]) if section else ""  # type: ignore[union-attr]
        lines = [f'<a id="{k.key}"></a>`{k.key.rpartition(".")[2]}` ({_values(k)}): {k.meaning}' for k in found]
        parts.append(f"## {name or 'Top level'}\n\n{fill(about)}\n\n" + items(lines))
    return "\n".join(parts)


def _values(knob: Knob) -> str:
    """The values that a setting takes, as `offbeat explain` has them but shorter, and its default."""
    kind = re.sub(r"\ba (whole )?number\b", lambda found: "integer" if found[1] else "number", knob.kind)
    for words, sign in ((", at least", " ≥"), (", above", " >"), (", at most", " ≤"), (", below", " <")):
        kind = kind.replace(words, sign)
    kind = kind.removeprefix("one of ").replace('your own as "file.py:name"', "your own")
    return kind if knob.default in ("", '""', "{}", "[]") else f"{kind}; `{knob.default}`"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def commands() -> str:
    """Every command of `offbeat`, with its arguments and options."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    parts = []
    for name, command in _commands(root, "offbeat"):
        context = typer.Context(command, info_name=name)
        usage, lines = [name, "[OPTIONS]"], []
        for param in command.params:
            assert isinstance(param, TyperArgument | TyperOption)
            shown = ", ".join(param.opts)
            if isinstance(param, TyperArgument):
                shown = param.metavar or param.name.upper()
                usage.append(shown if param.required else f"[{shown}]")
            if shown not in EVERYWHERE:
                lines.append(f"`{shown}`{_takes(param, context)}: {param.help or ''}{_option_default(param.default)}")
        about = inspect.cleandoc(command.help or "")
        parts.append(f"## {name}\n\n{about}\n\n    {' '.join(usage)}\n")
        if lines:
            parts.append(items(lines))
    return "\n".join(parts)


def _takes(param: TyperArgument | TyperOption, context: typer.Context) -> str:
    """What kind of value an option takes; arguments and texts need no word."""
    if isinstance(param, TyperArgument) or param.is_flag:
        return ""
    if param.metavar:
        return f" `{param.metavar}`"
    kind = param.display_type(context).strip("<>").removesuffix(" range")
    kind = re.sub(r"^list\[(\w+)\]$", r"\1", kind).lower()
    words = {"str": "", "path": "", "int": " N", "float": " number"}.get(kind, f" `{kind}`")
    words += f" ≥ {param.min:g}" if param.min is not None else ""
    return words + (f" ≤ {param.max:g}" if param.max is not None else "")


def _commands(group: TyperGroup, before: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{before} {name}")
        elif isinstance(command, TyperCommand):
            yield f"{before} {name}", command


def _option_default(value: object) -> str:
    return "" if value in (None, False, True, "", [], ()) else f" (`{value}`)"


def _number(value: float) -> str:
    return "any age" if isinf(value) else f"{value:g}"


def _choice(part: object) -> str:
    """One axis as a cell: the class name in words, its numbers in brackets, a dash for the plain choice."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(part).__name__).lower()
    if name in {"no-gate", "one", "nonetype"}:
        return "–"
    values = [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in values if v not in (inf, False)]
    return f"{name}({', '.join(shown)})" if shown else name


def _shaping(objective: Objective) -> str:
    """What happens to the data before the gradient."""
    parts = []
    if objective.drop_surplus:
        parts.append("drop surplus")
    if isinstance(objective.exp_weight, ExpWeight):
        parts.append("exp(A/T*)" if objective.exp_weight.adaptive else f"exp(A/{objective.exp_weight.temperature:g})")
    if objective.baseline_shift:
        parts.append(f"baseline − {objective.baseline_shift:g}")
    if objective.zero_variance_mask:
        parts.append("zero-variance mask")
    return ", ".join(parts) or "–"


def _needs(preset: Preset) -> str:
    """The log-probs a preset cannot work without."""
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"


def _choices(objective: Objective) -> str:
    """The choice on every axis but the plain ones."""
    others = [_choice(part) for part in (objective.correction, objective.reject, *objective.regularizers) if part]
    named = {
        "gate": _choice(objective.gate),
        "weight": _choice(objective.weight),
        "correction or regularizer": ", ".join(others) or "–",
    }
    parts = [
        f"{objective.advantage} advantages",
        _shaping(objective),
        *(f"{k} {v}" for k, v in named.items() if v != "–"),
    ]
    if objective.needs:
        against = "α" if objective.against.value == "behavior" else "π_k"
        parts.insert(2, f"{objective.ratio.value} ratio π/{against}")
    return ", ".join(part for part in parts if part != "–") + f", {objective.aggregate.value}"


def lags() -> str:
    """The presets by the longest lag that is reported, those that accept the longest first."""
    by_lag: dict[float, list[str]] = {}
    for preset in sorted(PRESETS.values(), key=lambda preset: -preset.reported_lag):
        alone = "" if preset.objective.needs else " (rewards alone)"
        by_lag.setdefault(preset.reported_lag, []).append(f"[`{preset.name}`](#{preset.name}){alone}")
    return items([f"{_number(lag)}: {', '.join(names)}" for lag, names in by_lag.items()])


def _measured(preset: Preset) -> str:
    """The verdicts of our own runs, each with a link to its row."""
    links = [
        f"[{str(one).partition(':')[0]}](../measured/{one.row.partition('.')[0]}.md#{one.row}) ({one.task})"
        for one in preset.measured
    ]
    return f" In our runs it {', '.join(links)}." if links else ""


def presets() -> str:
    """One section per preset."""
    parts = []
    for preset in PRESETS.values():
        lag = f"Lag up to {_number(preset.reported_lag)}: {preset.lag_evidence}.{_measured(preset)}"
        facts = f"{_capital(_choices(preset.objective))}. Needs {_needs(preset)}. {lag} Source: {preset.source}."
        parts.append(f"### {preset.name}\n\n{fill(preset.use)}\n\n$$\n{fill(preset.equation)}\n$$\n\n{fill(facts)}\n")
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of the registry."""
    return items(
        [
            f'<a id="{m.name}"></a>`{m.name}`: {m.meaning}. Formula: {m.formula}. *High*: {m.high}. *Low*: {m.low}.'
            for m in METRICS.values()
        ]
    )


def health_rules() -> str:
    """Every health rule, with what to do."""
    lines = []
    for rule in DEFAULT_RULES:
        unmeasured = "" if rule.metric in METRICS else " **Not measured yet: this rule cannot fire.**"
        fires = f"{str(rule).removeprefix(rule.metric + ' ')} for {rule.patience} steps"
        lines.append(
            f"[`{rule.metric}`](metrics.md#{rule.metric}) {fires}: {rule.action.value}; {rule.advice}.{unmeasured}"
        )
    return items(lines)


def events() -> str:
    """Every kind of line in events.jsonl."""
    lines = []
    for kind, spec in EVENTS.items():
        named = "; ".join(f"`{name}`: {meaning}" for name, meaning in spec.fields.items())
        lines.append(f'<a id="{kind.replace(" ", "-")}"></a>**`{kind}`**: {spec.meaning}.')
        lines[-1] += (f" {_capital(spec.action)}." if spec.action else "") + (f" *Fields*: {named}." if named else "")
    return items(lines)


def experience_schema() -> str:
    """The tables of the experience log; the meaning of a column is the comment beside it in schema.py."""
    source = Path(schema.__file__).read_text(encoding="utf-8")
    parts = []
    for name, columns in (
        ("groups", schema.GROUPS),
        ("scores", schema.SCORES),
        ("events", schema.EVENTS),
        ("quarantine", schema.QUARANTINE),
    ):
        begin = source.index(f"{name.upper()}: Final = pa.schema(")
        text = source[begin : source.index("\n)\n", begin)]
        meanings = dict(re.findall(r'pa\.field\("(\w+)".*?# (.*)', text))
        lines = [
            f"`{c.name}` {_type(c.type)}{' or null' * c.nullable}"
            + (f": {meanings[c.name]}" if c.name in meanings else "")
            for c in columns
        ]
        parts.append(f"### {name}.lance\n\n" + items(lines))
    return "\n".join(parts)


def _type(column: pa.DataType) -> str:
    """An Arrow type without the names of list items."""
    if pa.types.is_list(column):
        return f"list({_type(column.value_type)})"
    if pa.types.is_struct(column):
        return "struct(" + ", ".join(f"{field.name} {field.type}" for field in column) + ")"
    return str(column)


def refusals() -> str:
    """Every reason for which the experience log refuses a group or a late score."""
    meanings = _member_docs(Path(validation.__file__), "RefusalReason")
    return items([f"`{reason}`: {meanings[reason.name]} {_capital(REMEDIES[reason])}." for reason in RefusalReason])


def _member_docs(file: Path, name: str) -> dict[str, str]:
    """The text under each member of an enum, which Python does not keep."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
    found = {}
    for member, after in pairwise(body):
        if isinstance(member, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(member.targets[0], ast.Name)
            found[member.targets[0].id] = " ".join(str(after.value.value).split())
    return found


def error_tree() -> str:
    """Every error class below `OffbeatError`, each under its base."""
    return "\n".join(_errors(errors.OffbeatError, 0)) + "\n"


def _errors(kind: type[BaseException], depth: int) -> Iterator[str]:
    builtin = next((base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"), "")
    also = f" (also a `{builtin}`)" if builtin not in ("", "Exception") else ""
    about = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    indent = "    " * depth
    yield fill(f"`{kind.__name__}`{also}: {about}", f"{indent}- ", f"{indent}  ")
    for child in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
        if child.__module__ == errors.__name__:
            yield from _errors(child, depth + 1)


def spellings() -> str:
    """How a number may be written, from the list with which all of GSM8K is checked."""
    rows = [[s.name, f"`{s.write(Decimal(1234))}`".replace("\n", " ⏎ ")] for s in SPELLINGS]
    return table(["spelling", "a completion that ends in"], rows)


def _place(recipe: tuple[str, str]) -> tuple[int, bool]:
    """Sort recipes by what a user has; those for a model of your own come last."""
    known = facts(recipe[1])
    return list(PLACES).index(known["for"]), "your model" in known["needs"]


def recipe_table() -> str:
    """Every recipe by what a user has, and the hardware it was run on."""
    parts: dict[str, list[str]] = {}
    for name, text in sorted(recipes().items(), key=_place):
        title = text.partition("\n")[0].removeprefix(f"# {name}: ")
        ran = re.search(r"^# ((?:Not run|Run)\b.*(?:\n# .*)*)", text, re.M)
        assert ran, f"recipe {name} does not say where it was run"
        known = facts(text)
        about = f"{title}. Needs: {known['needs']}. {ran[1].replace(f'{chr(10)}# ', ' ').rstrip('.')}."
        file = f"[`{name}`](../../src/offbeat/recipes/{name}.toml)"
        parts.setdefault(known["for"], []).append(f"{file}: {about}")
    return "\n".join(f"**For {place}:**\n\n{items(found)}" for place, found in parts.items())


BUILDERS: Final[dict[str, Callable[[], str]]] = {
    "settings": settings,
    "commands": commands,
    "lags": lags,
    "presets": presets,
    "metrics": metrics,
    "health-rules": health_rules,
    "events": events,
    "experience-schema": experience_schema,
    "refusals": refusals,
    "errors": error_tree,
    "spellings": spellings,
    "recipes": recipe_table,
}
