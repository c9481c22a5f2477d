"""Errors of a run that are meant for the person: their sentence, what to do next, and no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from offbeat.cli.terminal import printable


@contextmanager
def plain_failures(advice: str = "") -> Iterator[None]:
    """End the command with the error's own sentence where it has one, and with advice."""
    from offbeat.experience.table import LogError
    from offbeat.rollout.engine import EngineDead
    from offbeat.rollout.probe import ProbeFailed
    from offbeat.rollout.worker import WorkerFailed
    from offbeat.run.directory import RunError
    from offbeat.run.fleet import FleetLost
    from offbeat.run.loop import Stopped, TooLong
    from offbeat.tasks.scoring import PoolError
    from offbeat.tasks.task import TaskError
    from offbeat.trainer.checkpoint_files import CheckpointError
    from offbeat.trainer.estimate import OutOfMemory
    from offbeat.trainer.launch import RankLost
    from offbeat.weights.errors import WeightLogError

    meant = (CheckpointError, EngineDead, FleetLost, LogError, PoolError, ProbeFailed, RunError, Stopped, TaskError)
    try:
        yield
    except (*meant, OutOfMemory, RankLost, TooLong, WeightLogError, WorkerFailed) as error:
        typer.echo(printable(str(error)), err=True)
        if advice:
            typer.echo(advice, err=True)
        raise typer.Exit(1) from error
