"""`offbeat explain`: what a metric means, what a setting does. `offbeat objectives`: which objectives there are."""

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import suggest_nearest

if TYPE_CHECKING:
    from offbeat.config.knobs import Knob
    from offbeat.metrics import Metric
    from offbeat.objective.presets import Preset


def objectives(
    name: Annotated[str | None, typer.Argument(help="Show one objective in full, for example: red-weight")] = None,
) -> None:
    """List the objectives, or show one in full: `offbeat objectives red-weight`."""
    from rich.console import Console
    from rich.table import Column, Table

    from offbeat.objective.presets import PRESETS

    console = Console()
    if name is None:
        table = Table(Column("name", no_wrap=True), "needs", "reported", Column("measured", no_wrap=True), "use")
        for preset in PRESETS.values():
            use = preset.use.partition(". ")[0].rstrip(".")
            table.add_row(preset.name, _needs(preset), f"{preset.reported_lag:g}", _measured(preset), use)
        console.print(table)
        console.print(
            "reported: the largest lag in papers. measured: steps between two publishes in our runs, ✓ tolerated, "
            "✗ not, ? undecided; each holds for a drift: `offbeat objectives NAME`",
            highlight=False,
        )
        return
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is not an objective; {suggest_nearest(name, PRESETS)}")
    preset = PRESETS[name]
    console.print(f"[bold]{preset.name}[/]  ({preset.source})", highlight=False)
    console.print(f"{preset.use}\n")
    console.print(f"maximizes   {preset.equation}", markup=False, highlight=False)
    console.print(f"needs       {_needs(preset)}", highlight=False)
    console.print(f"lag         reported up to {preset.reported_lag:g}: {preset.lag_evidence}", highlight=False)
    for one in preset.measured:
        console.print(f"            {one}", highlight=False)
    console.print(f"axes        {preset.objective}", markup=False, highlight=False)


def _measured(preset: "Preset") -> str:
    """Return the verdicts of our own runs in short: "5 ✓ 20 ✗"."""
    marks = {"tolerates": "✓", "fails": "✗", "undecided": "?"}
    return " ".join(f"{one.v} {marks[one.verdict]}" for one in preset.measured)


def _needs(preset: "Preset") -> str:
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"


def explain(
    name: Annotated[
        str | None,
        typer.Argument(help="A metric, setting, objective or event, for example: ess; without one, all are listed"),
    ] = None,
) -> None:
    """Explain a metric, a setting, an objective or an event: `offbeat explain ess`, `offbeat explain sync.every`.

    You can leave out the section of a setting: `offbeat explain top_p`. Without a name, everything is listed.
    """
    from offbeat.config.knobs import knobs
    from offbeat.events import EVENTS
    from offbeat.metrics import METRICS
    from offbeat.objective.presets import PRESETS

    if name is None:
        _list_all()
        return
    if name in METRICS:
        _print_metric(METRICS[name])
    if name in EVENTS:
        _print_event(name)
    if name in PRESETS:
        objectives(name)
    found = [knob for key, knob in knobs().items() if name in (key, key.rpartition(".")[2])]
    for knob in found:
        _print_setting(knob)
    every = [*METRICS, *knobs(), *PRESETS, *EVENTS]
    if not found and name not in every:
        raise typer.BadParameter(f"{name!r} is not a metric, setting, objective or event; {_hint(name, every)}")


def _hint(name: str, names: list[str]) -> str:
    near = suggest_nearest(name, [*names, *(one.rpartition(".")[2] for one in names if "." in one)])
    return near if near.startswith("did") else "list all with `offbeat explain`"


def _list_all() -> None:
    """Print one line for everything that can be explained, by group."""
    from offbeat.config.knobs import knobs
    from offbeat.events import EVENTS
    from offbeat.metrics import METRICS
    from offbeat.objective.presets import PRESETS

    sections: dict[str, dict[str, str]] = {}
    for key, knob in knobs().items():
        sections.setdefault(key.rpartition(".")[0], {})[key] = knob.meaning
    _print_group("metrics of a step", ((one.name, one.meaning) for one in METRICS.values()))
    for section, settings in sections.items():
        _print_group(f"settings in [{section}]" if section else "settings at the top of the file", settings.items())
    _print_group("objectives", ((one.name, one.use) for one in PRESETS.values()))
    _print_group("events of a run", ((kind, spec.meaning) for kind, spec in EVENTS.items()))
    typer.echo("one of them in full: offbeat explain NAME")


def _print_group(title: str, entries: Iterable[tuple[str, str]]) -> None:
    """Print a title and one line for each entry, cut to the width of the terminal."""
    rows = list(entries)
    indent = max(len(name) for name, _ in rows) + 4
    width = max(20, shutil.get_terminal_size().columns - indent)
    typer.echo(title)
    for name, meaning in rows:
        typer.echo(f"  {name}".ljust(indent) + textwrap.shorten(meaning, width, placeholder=" …"))
    typer.echo("")


def _print_event(name: str) -> None:
    from offbeat.events import EVENTS, EventKind

    spec = EVENTS[EventKind(name)]
    typer.echo(f"{name}: an event of a run, in events.jsonl")
    typer.echo(f"  {spec.meaning}")
    if spec.action:
        typer.echo(f"  what to do: {spec.action}")


def _print_metric(metric: "Metric") -> None:
    typer.echo(f"{metric.name} = {metric.formula}   ({metric.reduction.value})")
    typer.echo(f"  {metric.meaning}")
    typer.echo(f"  high: {metric.high}")
    typer.echo(f"  low:  {metric.low}")


def _print_setting(knob: "Knob") -> None:
    table, _, name = knob.key.rpartition(".")
    typer.echo(f"{knob.key}: {knob.kind}; " + (f"default {knob.default}" if knob.default else "no default"))
    typer.echo(f"  {knob.meaning}")
    value = knob.default or "…"
    typer.echo(
        f"  in the file: {f'[{table}] ' if table else ''}{name} = {value}    for one run: --set {knob.key}={value}"
    )
