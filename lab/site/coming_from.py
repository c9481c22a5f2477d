"""The tables of the pages for people who come from TRL or verl, and of names in dashboards, built from the code."""

from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Final

from offbeat.config.synonyms import Synonym, synonyms
from offbeat.metrics import METRICS
from offbeat.run.sinks.values import TRL_NAMES, Value, curves_of, plain_curves_of

SAME: Final = "takes the same value"
NAMES: Final = {"trl": "TRL", "verl": "verl"}


def knob_tables(tool: str) -> str:
    """Return a table of settings for each group of names in synonyms.toml."""
    parts = []
    for heading, names in _groups(tool):
        rows = [
            f"| `{one.name}` | {_setting(one)} | {_cell(one.note) or SAME} |"
            for one in map(synonyms().get, names)
            if one
        ]
        parts.append(
            f"### {heading}\n\n| {NAMES[tool]} | offbeat | what differs |\n| --- | --- | --- |\n"
            + "\n".join(rows)
            + "\n"
        )
    return "\n".join(parts)


def _groups(tool: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the comments inside a tool's table with the names below each."""
    text = files("offbeat.config").joinpath("synonyms.toml").read_text(encoding="utf-8")
    table = text.partition(f"\n[{tool}]\n")[2].partition("\n[")[0]
    for part in table.split("# ")[1:]:
        heading, *lines = part.splitlines()
        yield heading, [line.partition(" = ")[0].strip('"') for line in lines if " = " in line]


def _setting(one: Synonym) -> str:
    if not one.setting:
        return "–"
    return f"[`{one.setting}`](reference/config.md#{one.setting})"


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def dashboard_names() -> str:
    """Return what each metric is called in wandb, trackio and tensorboard, and in MLflow."""
    lines = ["| metric | wandb, trackio, tensorboard | MLflow |", "| --- | --- | --- |"]
    for name in METRICS:
        values = [Value(name, 0.0)]
        lines.append(f"| `{name}` | {_names(curves_of(values))} | {_names(plain_curves_of(values))} |")
    return "\n".join(lines) + "\n"


def _names(curves: dict[str, float]) -> str:
    return ", ".join(f"`{name}`" for name in curves)


def trl_metrics() -> str:
    """Return the metrics of TRL that offbeat has too."""
    lines = ["| TRL | offbeat |", "| --- | --- |"]
    lines += [f"| `{theirs}` | [`{ours}`](reference/metrics.md) |" for ours, theirs in TRL_NAMES.items()]
    return "\n".join(lines) + "\n"


BUILDERS: Final[dict[str, Callable[[], str]]] = {
    "knobs-trl": lambda: knob_tables("trl"),
    "knobs-verl": lambda: knob_tables("verl"),
    "dashboard-names": dashboard_names,
    "trl-metrics": trl_metrics,
}
