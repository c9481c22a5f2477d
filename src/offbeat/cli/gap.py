"""`offbeat gap`: which part of what the ratio sees is the engine's?"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.terminal import plain_errors, printable
from offbeat.working import Working


def gap(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory")],
    groups: Annotated[int, typer.Option(min=1, help="Trained groups to compute again, spread over the run")] = 64,
) -> None:
    """Split what the objective saw, π_k/α, into engine mismatch and lag: `offbeat gap runs/one`.

    Computes logged tokens again with the trainer's arithmetic, under the version that wrote them and under the policy
    that was trained on them. Works while a run is running; the model is loaded on one device.
    """
    with plain_errors(), Working("loading torch") as working:
        from offbeat.reports.gap import measure_gap
        from offbeat.reports.run import Run

        directory = Run(run).directory
        working.next("computing log-probs again")
        found = measure_gap(directory, groups)
    typer.echo(printable(str(found)))
