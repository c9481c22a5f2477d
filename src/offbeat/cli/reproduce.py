"""`offbeat reproduce`: the experiments of two papers, all arms, beside what was published."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.check import Settings
from offbeat.cli.terminal import plain_errors, printable
from offbeat.errors import ConfigError
from offbeat.words import count

if TYPE_CHECKING:
    from offbeat.papers import Reproduction


def reproduce(
    paper: Annotated[str, typer.Argument(help="p1: Yao, Chen et al., arXiv 2509.24203; p2: Mroueh et al., 2505.22257")],
    out: Annotated[Path | None, typer.Option(help="Directory of the runs; default: runs/<paper>")] = None,
    arms: Annotated[str | None, typer.Option(help="Arms, as in v1,v10-mask; default: all")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as in 1,2,3")] = "1",
    model: Annotated[str | None, typer.Option(help="Directory or hub name; default: the paper's")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of every arm; default: the paper's")] = None,
    short: Annotated[bool, typer.Option("--short", help="An evening on one GPU instead of the paper's length")] = False,
    settings: Settings = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print device plans and hours; train nothing")] = False,
    gpus: Annotated[str, typer.Option(metavar="GPUSxGIB", help="The hardware of --plan")] = "1x24",
    table: Annotated[bool, typer.Option("--table", help="Print the table of what is there; train nothing")] = False,
) -> None:
    """Repeat the experiments of a paper on one GPU: `offbeat reproduce p2 --seeds 1,2,3`.

    All arms are trained, one run after the other, and stand in one table beside the published figures. The same command
    continues after an interruption: finished runs are kept, the one that was interrupted resumes. Ctrl-C stops after
    the step.
    """
    from offbeat.papers import Reproduction

    with plain_errors(code=2):
        chosen = Reproduction.of(paper, out or Path("runs") / paper, arms.split(",") if arms else ())
        own = [f"model.path='{model}'"] if model else []
        chosen = replace(chosen, seeds=_numbers(seeds), steps=steps, short=short, settings=(*own, *(settings or ())))
    if plan:
        _print_plan(chosen, gpus)
        return
    failed = [] if table else _train(chosen)
    with plain_errors():
        typer.echo(printable(chosen.table()))
    for line in failed:
        typer.echo(line, err=True)
    if failed:
        raise typer.Exit(1)


def _train(chosen: "Reproduction") -> list[str]:
    """Train what is not finished, and return what failed."""
    with plain_errors(code=2):
        try:
            typer.echo(chosen.resolution)
            return chosen.run(typer.echo)
        except KeyboardInterrupt:
            typer.echo(printable(chosen.table()))
            typer.echo("stopped; the same command continues", err=True)
            raise typer.Exit(130) from None


def _print_plan(chosen: "Reproduction", gpus: str) -> None:
    total, planned = 0.0, 0
    with plain_errors(code=2):
        for arm, devices, hours in chosen.devices(gpus):
            how = "no plan" if hours is None else f"about {hours:.1f} h a seed"
            typer.echo(printable(f"{arm}: {how}; {devices}"))
            total += (hours or 0.0) * len(chosen.seeds)
            planned += hours is not None
        typer.echo(
            f"{total:.0f} h for {count(len(chosen.seeds), 'seed')} of {count(planned, 'arm')}: the arithmetic at 100 "
            "TFLOP/s, if every answer is as long as allowed; we have no GPU to measure"
        )
        typer.echo(chosen.resolution)
    if planned < len(chosen.arms):
        raise typer.Exit(2)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(one) for one in text.split(",")))
    except ValueError:
        raise ConfigError([f"--seeds {text!r} is not a list of numbers; write 1,2,3"]) from None
