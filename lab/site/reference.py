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

from lab.site import events as event_table
from offbeat import errors
from offbeat.cli.init import PLACES, facts, recipes
from offbeat.cli.main import app
from offbeat.config import Config
from offbeat.config.knobs import Knob, knobs
from offbeat.experience import schema, validation
from offbeat.experience.validation import RefusalReason
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import ExpWeight, Objective
from offbeat.run.health import DEFAULT_RULES
from tests.fixtures.gsm8k_spellings import SPELLINGS

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
        rows = [
            [
                f'<a id="{k.key}"></a>`{k.key.rpartition(".")[2]}`',
                k.kind,
                _default(k.default),
                k.meaning.replace("\n", " "),
            ]
            for k in found
        ]
        parts.append(
            f"## {name or 'Top level'}\n\n{about}\n\n" + table(["setting", "type", "default", "meaning"], rows)
        )
    return "\n".join(parts)


def _default(text: str) -> str:
    return f"`{text}`" if text not in ("", '""', "{}", "[]") else "–"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def commands() -> str:
    """Every command of `offbeat`, with its arguments and options."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    parts = []
    for name, command in _commands(root, "offbeat"):
        context = typer.Context(command, info_name=name)
        usage, rows = [name, "[OPTIONS]"], []
        for param in command.params:
            assert isinstance(param, TyperArgument | TyperOption)
            shown = ", ".join(param.opts)
            if isinstance(param, TyperArgument):
                shown = param.metavar or param.name.upper()
                usage.append(shown if param.required else f"[{shown}]")
            default = "required" if param.required else _option_default(param.default)
            rows.append([f"`{shown}`", _takes(param, context), default, (param.help or "").replace("\n", " ")])
        about = inspect.cleandoc(command.help or "")
        parts.append(f"## {name}\n\n{about}\n\n```text\n{' '.join(usage)}\n```\n")
        if rows:
            parts.append(table(["option", "takes", "default", "meaning"], rows))
    return "\n".join(parts)


def _takes(param: TyperArgument | TyperOption, context: typer.Context) -> str:
    """What kind of value an argument or option takes."""
    if isinstance(param, TyperOption) and (param.is_flag or param.metavar):
        return param.metavar or "–"
    kind = param.display_type(context).strip("<>").removesuffix(" range")
    kind = re.sub(r"^list\[(\w+)\]$", r"\1", kind).lower()
    words = [{"str": "text", "int": "a whole number", "float": "a number", "path": "a path"}.get(kind, kind)]
    words += [f"at least {param.min:g}"] if param.min is not None else []
    words += [f"at most {param.max:g}"] if param.max is not None else []
    return ", ".join(words)


def _commands(group: TyperGroup, before: str) -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{before} {name}")
        elif isinstance(command, TyperCommand):
            yield f"{before} {name}", command


def _option_default(value: object) -> str:
    return "–" if value in (None, False, "", [], ()) else f"`{value}`"


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


def axes() -> str:
    """One row per preset, one column per axis."""
    header = ["preset", "advantage", "shaping", "ratio", "gate", "weight", "correction, regularizer", "aggregate"]
    rows = []
    for preset in PRESETS.values():
        o = preset.objective
        ratio = f"{o.ratio.value}, π/{'α' if o.against.value == 'behavior' else 'π_k'}"
        others = [_choice(part) for part in (o.correction, o.reject, *o.regularizers) if part is not None]
        row = [f"[`{preset.name}`](#{preset.name})", str(o.advantage), _shaping(o)]
        row += [ratio if _needs(preset) != "rewards alone" else "–", _choice(o.gate), _choice(o.weight)]
        row += [", ".join(others) or "–", o.aggregate.value]
        rows.append(row)
    return table(header, rows)


def lags() -> str:
    """Which preset for which lag; presets that accept the longest lag come first."""
    ordered = sorted(PRESETS.values(), key=lambda preset: -preset.reported_lag)
    rows = [
        [f"[`{p.name}`](#{p.name})", _number(p.reported_lag), _needs(p), p.lag_evidence, _measured(p)] for p in ordered
    ]
    return table(["preset", "lag up to", "needs", "reported", "measured by us"], rows)


def _measured(preset: Preset) -> str:
    """The verdicts of our own runs, each with a link to its row."""
    links = (f"[{one}](../measured/{one.row.partition('.')[0]}.md#{one.row})" for one in preset.measured)
    return "<br>".join(links) or "–"


def presets() -> str:
    """One section per preset."""
    parts = []
    for preset in PRESETS.values():
        parts.append(
            f"### {preset.name}\n\n{preset.use}\n\n$$ {preset.equation} $$\n\n"
            f"Needs {_needs(preset)}. Reported up to lag {_number(preset.reported_lag)}: {preset.lag_evidence}. "
            f"Source: {preset.source}.\n"
        )
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of the registry."""
    rows = [
        [f'<a id="{m.name}"></a>`{m.name}`', m.formula, m.reduction.value, m.meaning, m.high, m.low]
        for m in METRICS.values()
    ]
    return table(["metric", "formula", "reduced by", "meaning", "if high", "if low"], rows)


def health_rules() -> str:
    """Every health rule, with the meaning of its metric."""
    rows = []
    for rule in DEFAULT_RULES:
        meaning = "**not measured yet: this rule cannot fire**"
        if (metric := METRICS.get(rule.metric)) is not None:
            meaning = f"{metric.meaning}; {metric.low if rule.below is not None else metric.high}"
        fires = f"{str(rule).removeprefix(rule.metric + ' ')} for {rule.patience} steps"
        rows.append([f"[`{rule.metric}`](metrics.md#{rule.metric})", fires, rule.action.value, meaning, rule.advice])
    return table(["metric", "fires when it is", "action", "meaning", "what to do"], rows)


def events() -> str:
    """Every kind of line in events.jsonl."""
    rows = [[f'<a id="{kind.strip("`").replace(" ", "-")}"></a>{kind}', *rest] for kind, *rest in event_table.rows()]
    return table(["kind", "fields", "meaning", "what to do"], rows)


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
        rows = [[f"`{c.name}`", _type(c.type), "yes" if c.nullable else "", meanings.get(c.name, "")] for c in columns]
        parts.append(f"### {name}.lance\n\n" + table(["column", "type", "null", "meaning"], rows))
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
    rows = [[f"`{reason}`", meanings[reason.name], REMEDIES[reason]] for reason in RefusalReason]
    return table(["reason", "what was refused", "what to do"], rows)


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
    yield f"{'    ' * depth}- `{kind.__name__}`{also}: {about}"
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
    rows = []
    for name, text in sorted(recipes().items(), key=_place):
        title = text.partition("\n")[0].removeprefix(f"# {name}: ")
        ran = re.search(r"^# ((?:Not run|Run)\b.*(?:\n# .*)*)", text, re.M)
        assert ran, f"recipe {name} does not say where it was run"
        file = f"[`{name}`](../../src/offbeat/recipes/{name}.toml)"
        known = facts(text)
        rows.append([file, title, known["for"], known["needs"], ran[1].replace("\n# ", " ").rstrip(".")])
    return table(["recipe", "what it does", "for", "memory and time", "hardware"], rows)


BUILDERS: Final[dict[str, Callable[[], str]]] = {
    "settings": settings,
    "commands": commands,
    "axes": axes,
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
