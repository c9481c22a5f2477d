"""`offbeat explain`: what a metric means."""

from typing import Annotated

import typer

from offbeat.metrics import METRICS
from offbeat.nearest import nearest


def explain(name: Annotated[str, typer.Argument(help="A metric, for example: drift_tv_token")]) -> None:
    """Say what a metric is and what its values tell: `offbeat explain ess`."""
    if name not in METRICS:
        raise typer.BadParameter(f"{name!r} is not a metric; {nearest(name, METRICS)}")
    metric = METRICS[name]
    typer.echo(f"{metric.name} = {metric.formula}   ({metric.reduction.value})")
    typer.echo(f"  {metric.meaning}")
    typer.echo(f"  high: {metric.high}")
    typer.echo(f"  low:  {metric.low}")
