"""`offbeat explain`: what a metric means, what a setting does. `offbeat objectives`: which objectives there are."""

from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.errors import suggest_nearest
from offbeat.metrics import METRICS, Metric
from offbeat.objective.presets import PRESETS, Preset

if TYPE_CHECKING:
    from offbeat.config.knobs import Knob


def objectives(
    name: Annotated[str | None, typer.Argument(help="Show one objective in full, for example: red-weight")] = None,
) -> None:
    """List the objectives, or show one in full: `offbeat objectives red-weight`."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if name is None:
        table = Table("name", "needs", "lag up to", "when to use it")
        for preset in PRESETS.values():
            table.add_row(preset.name, _needs(preset), f"{preset.lag_limit:g}", preset.use)
        console.print(table)
        return
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is not an objective; {suggest_nearest(name, PRESETS)}")
    preset = PRESETS[name]
    console.print(f"[bold]{preset.name}[/]  ({preset.source})", highlight=False)
    console.print(f"{preset.use}\n")
    console.print(f"maximizes   {preset.equation}", markup=False, highlight=False)
    console.print(f"needs       {_needs(preset)}", highlight=False)
    console.print(f"lag         up to {preset.lag_limit:g}: {preset.lag_evidence}", highlight=False)
    console.print(f"axes        {preset.objective}", markup=False, highlight=False)


def _needs(preset: Preset) -> str:
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"


def explain(
    name: Annotated[str, typer.Argument(help="A metric or a setting, for example: drift_tv_token, or sync.every")],
) -> None:
    """Explain a metric or a setting: `offbeat explain ess`, `offbeat explain sync.every`.

    You can leave out the section of a setting: `offbeat explain top_p`.
    """
    from offbeat.config.knobs import knobs

    if name in METRICS:
        _print_metric(METRICS[name])
    found = [knob for key, knob in knobs().items() if name in (key, key.rpartition(".")[2])]
    for knob in found:
        _print_setting(knob)
    if not found and name not in METRICS:
        raise typer.BadParameter(f"{name!r} is neither a metric nor a setting; {_hint(name, list(knobs()))}")


def _hint(name: str, keys: list[str]) -> str:
    near = suggest_nearest(name, [*METRICS, *keys, *(key.rpartition(".")[2] for key in keys)])
    return near if near.startswith("did") else f"metrics: {', '.join(METRICS)}; settings: {', '.join(keys)}"


def _print_metric(metric: Metric) -> None:
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
