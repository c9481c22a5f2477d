"""The lists of the pages for people who come from TRL or verl, and of names in dashboards, built from the code."""

from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Final

from lab.site.lines import fill, items
from offbeat.config.knobs import Synonym, synonyms
from offbeat.metrics import METRICS
from offbeat.run.sinks.values import TRL_NAMES, Value, curves_of, plain_curves_of


def knob_lists(tool: str) -> str:
    """Return a list of settings for each group of names in synonyms.toml; names with the same answer share a line."""
    return "\n".join(f"### {heading}\n\n{items(_answers(names))}" for heading, names in _groups(tool))


def _answers(names: list[str]) -> list[str]:
    same, others = [], dict[tuple[str, str], list[str]]()
    for one in filter(None, map(synonyms().get, names)):
        if one.note:
            others.setdefault((_setting(one), one.note), []).append(f"`{one.name}`")
        else:
            same.append(f"`{one.name}` is {_setting(one)}")
    lines = [f"The same value: {', '.join(same)}."] if same else []
    for (setting, note), found in others.items():
        lines.append(f"{', '.join(found)}{f' → {setting}' if setting else ''}: {note}")
    return lines


def _groups(tool: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the comments inside a tool's table with the names below each."""
    text = files("offbeat.config").joinpath("synonyms.toml").read_text(encoding="utf-8")
    table = text.partition(f"\n[{tool}]\n")[2].partition("\n[")[0]
    for part in table.split("# ")[1:]:
        heading, *lines = part.splitlines()
        yield heading, [line.partition(" = ")[0].strip('"') for line in lines if " = " in line]


def _setting(one: Synonym) -> str:
    return f"[`{one.setting}`](reference/config.md#{one.setting})" if one.setting else ""


def dashboard_names() -> str:
    """Return the metrics that other tools also get under the name that TRL has for them."""
    lines = []
    for name in METRICS:
        curves, plain = curves_of([Value(name, 0.0)]), plain_curves_of([Value(name, 0.0)])
        if len(curves) > 1 or list(curves) != list(plain):
            lines.append(f"`{name}`: {_names(curves)}; MLflow {_names(plain)}")
    return items(lines)


def _names(curves: dict[str, float]) -> str:
    return ", ".join(f"`{name}`" for name in curves)


def trl_metrics() -> str:
    """Return the metrics of TRL that offbeat has too."""
    return fill("; ".join(f"`{theirs}` is `{ours}`" for ours, theirs in TRL_NAMES.items())) + ".\n"


BUILDERS: Final[dict[str, Callable[[], str]]] = {
    "knobs-trl": lambda: knob_lists("trl"),
    "knobs-verl": lambda: knob_lists("verl"),
    "dashboard-names": dashboard_names,
    "trl-metrics": trl_metrics,
}
