"""`offbeat objectives`: which objective, for which lag, needing what."""

from typing import Annotated

import typer

from offbeat.nearest import nearest
from offbeat.objective.presets import PRESETS, Preset


def objectives(
    name: Annotated[str | None, typer.Argument(help="One preset in full, for example: rec-oneside-nois")] = None,
) -> None:
    """List the objectives, or show one: `offbeat objectives red-weight`."""
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
        raise typer.BadParameter(f"{name!r} is not an objective; {nearest(name, PRESETS)}")
    preset = PRESETS[name]
    console.print(f"[bold]{preset.name}[/]  ({preset.source})", highlight=False)
    console.print(f"{preset.use}\n")
    console.print(f"maximises   {preset.equation}", markup=False, highlight=False)
    console.print(f"needs       {_needs(preset)}", highlight=False)
    console.print(f"lag         up to {preset.lag_limit:g}: {preset.lag_evidence}", highlight=False)
    console.print(f"axes        {preset.objective}", markup=False, highlight=False)


def _needs(preset: Preset) -> str:
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"
