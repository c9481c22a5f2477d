"""Fill the built parts of the docs: tables that come from code or from lab/results, so that they cannot drift.

    python scripts/build_docs.py            write them
    python scripts/build_docs.py --check    fail if a file is not as it would be written

A built part stands between `<!-- built: NAME -->` and `<!-- end -->`, where NAME is one of `BUILDERS`, or
`results SLUG` for a table of lab/results/SLUG.json.
"""

import json
import re
import sys
from dataclasses import fields
from decimal import Decimal
from math import inf, isinf
from pathlib import Path

import pyarrow as pa

from offbeat.cli.init import recipes
from offbeat.experience import schema
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import ExpWeight, Objective
from offbeat.run.health import DEFAULT_RULES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.bench.gsm8k_spellings import SPELLINGS  # noqa: E402
from lab.site import events as docs_events  # noqa: E402  # found by the line above

BLOCK = re.compile(r"(<!-- built: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells) + "\n"


def number(value: float) -> str:
    """A limit in words people use."""
    return "any age" if isinf(value) else f"{value:g}"


def choice(part: object) -> str:
    """One axis as a cell: the class in words, its numbers in brackets, nothing for the plain choice."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(part).__name__).lower()
    if name in {"no-gate", "one", "nonetype"}:
        return "–"
    values = [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in values if v not in (inf, False)]
    return f"{name}({', '.join(shown)})" if shown else name


def shaping(objective: Objective) -> str:
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


def needs(preset: Preset) -> str:
    """The streams a preset cannot do without."""
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"


def axes() -> str:
    """One row per preset, one column per axis."""
    header = ["preset", "advantage", "shaping", "ratio", "gate", "weight", "π_k/α", "regularizer", "aggregate"]
    rows = []
    for preset in PRESETS.values():
        o = preset.objective
        ratio = f"{o.ratio.value}, π/{'α' if o.against.value == 'behavior' else 'π_k'}"
        corrections = [choice(c) for c in (o.correction, o.reject) if c is not None]
        regularizers = [choice(r) for r in o.regularizers]
        row = [f"[`{preset.name}`](#{preset.name})", o.advantage.value, shaping(o)]
        row += [ratio if needs(preset) != "rewards alone" else "–", choice(o.gate), choice(o.weight)]
        row += [", ".join(corrections) or "–", ", ".join(regularizers) or "–", o.aggregate.value]
        rows.append(row)
    return table(header, rows)


def lags() -> str:
    """Which preset for which lag, patient ones first."""
    ordered = sorted(PRESETS.values(), key=lambda preset: -preset.lag_limit)
    rows = [[f"`{p.name}`", number(p.lag_limit), needs(p), p.lag_evidence] for p in ordered]
    return table(["preset", "lag up to", "needs", "on what evidence"], rows)


def presets() -> str:
    """A section per preset."""
    parts = []
    for preset in PRESETS.values():
        parts.append(
            f"### {preset.name}\n\n{preset.use}\n\n$$ {preset.equation} $$\n\n"
            f"Needs {needs(preset)}. Lag up to {number(preset.lag_limit)}: {preset.lag_evidence}. "
            f"Source: {preset.source}.\n"
        )
    return "\n".join(parts)


def metrics() -> str:
    """Every metric of the registry."""
    rows = [[f"`{m.name}`", m.formula, m.reduction.value, m.meaning, m.high, m.low] for m in METRICS.values()]
    return table(["metric", "formula", "reduced by", "what it is", "high", "low"], rows)


def results(slug: str, *items: str) -> str:
    """The figures of one area, those that fall short included; of some of its items only, where any are named."""
    rows = json.loads((ROOT / "lab" / "results" / f"{slug}.json").read_text(encoding="utf-8"))
    cells = []
    for row in [row for row in rows if not items or row["id"].split(".")[1] in items]:
        measured = f"{row['measured']} {row['unit']}".strip()
        verdict = "yes" if row["holds"] else "**no**"
        cells.append([row["id"], row["what"], row["goal"], measured, verdict, str(row["n"]), row["note"]])
        cells[-1].append(f"`{row['command']}` at {row['commit']}, {row['date']}")
    return table(["figure", "what", "goal", "measured", "holds", "n", "note", "by"], cells)


def shortfalls() -> str:
    """Every figure of every area that misses its goal."""
    found = [
        [f"`{row['id']}`", row["what"], row["goal"], f"{row['measured']} {row['unit']}".strip(), row["note"]]
        for file in sorted((ROOT / "lab" / "results").glob("*.json"))
        for row in json.loads(file.read_text(encoding="utf-8"))
        if not row["holds"]
    ]
    return table(["figure", "what", "goal", "measured", "note"], found)


def transcript() -> str:
    """The quickstart in a new environment, as `lab/site/user_path.py quickstart` saw it."""
    file = ROOT / "docs" / "quickstart-transcript.txt"
    if not file.exists():
        return "What it says is kept by `python -m lab.site.user_path quickstart`, which has not been run here.\n"
    kept = re.sub(r"(?:^step \d+/\d+ .*\n)+", "…\n", file.read_text(encoding="utf-8").strip(), flags=re.M)
    return f"Every line of it, those of the steps included, is [kept]({file.name}).\n\n```text\n{kept}\n```\n"


def experience_schema() -> str:
    """The tables of the experience log; what a column means stands beside it in schema.py."""
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
        parts.append(f"`{name}.lance`\n\n" + table(["column", "type", "null", "meaning"], rows))
    return "\n".join(parts)


def _type(column: pa.DataType) -> str:
    """An Arrow type without the names of list items."""
    if pa.types.is_list(column):
        return f"list({_type(column.value_type)})"
    if pa.types.is_struct(column):
        return "struct(" + ", ".join(f"{field.name} {field.type}" for field in column) + ")"
    return str(column)


def spellings() -> str:
    """How numbers may be written, from the list that all of GSM8K is checked with."""
    rows = [[s.name, f"`{s.write(Decimal(1234))}`".replace("\n", " ⏎ ")] for s in SPELLINGS]
    return table(["spelling", "a completion ends in"], rows)


def alarms() -> str:
    """Every health rule, with the meaning of what it looks at."""
    rows = []
    for rule in DEFAULT_RULES:
        meaning = "**not measured yet: this rule cannot speak**"
        if (metric := METRICS.get(rule.metric)) is not None:
            meaning = f"{metric.meaning}; {metric.low if rule.below is not None else metric.high}"
        spoken = f"{str(rule).removeprefix(rule.metric + ' ')} for {rule.patience} steps"
        rows.append([f"`{rule.metric}`", spoken, rule.action.value, meaning, rule.advice])
    return table(["metric", "speaks when", "and does", "what it means", "what to do"], rows)


def events() -> str:
    """Every kind of line in events.jsonl."""
    return table(["kind", "fields", "what it says", "what to do"], docs_events.rows(ROOT / "src"))


def recipe_table() -> str:
    """Every recipe, and on which hardware it was run."""
    rows = []
    for name, text in recipes().items():
        title = text.partition("\n")[0].removeprefix(f"# {name}: ")
        ran = re.search(r"^# ((?:Not run|Run) by us.*(?:\n# .*)*)", text, re.M)
        assert ran, f"recipe {name} does not say where it was run"
        file = f"[`{name}`](../src/offbeat/recipes/{name}.toml)"
        rows.append([file, title, ran[1].replace("\n# ", " ").rstrip(".")])
    return table(["recipe", "what", "hardware"], rows)


BUILDERS = {
    "alarms": alarms,
    "events": events,
    "recipes": recipe_table,
    "shortfalls": shortfalls,
    "transcript": transcript,
    "axes": axes,
    "lags": lags,
    "presets": presets,
    "metrics": metrics,
    "experience-schema": experience_schema,
    "spellings": spellings,
}


def fill(text: str) -> str:
    """`text` with every built part made anew."""

    def build(match: re.Match[str]) -> str:
        name = match[2]
        made = results(*name.split()[1:]) if name.startswith("results ") else BUILDERS[name]()
        return match[1] + "\n" + made + "\n" + match[3]

    return BLOCK.sub(build, text)


def main(check: bool) -> int:
    """Fill all docs, or say which are not as they would be filled."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(filled, encoding="utf-8")
    if check and stale:
        print(f"not as built: {', '.join(stale)}; run python scripts/build_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
