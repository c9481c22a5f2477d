"""Sinks that call other packages: tensorboard, wandb, trackio and MLflow.

Each gets the configuration, every number under our name and, where it has one, under TRL's, and a table of samples. A
resumed run continues the run of the package that it began.
"""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from offbeat.run.directory import RunDirectory
from offbeat.run.sinks.samples import COLUMNS, Sample
from offbeat.run.sinks.values import Value, curves_of, plain_curves_of

PROJECT = "offbeat"
"""Where runs go unless the package's own environment variable names another project."""


@dataclass(frozen=True)
class PackageSink:
    """A sink that calls another package."""

    write: Callable[[int, Sequence[Value]], None]
    show: Callable[[int, Sequence[Sample]], None]
    close: Callable[[], None]


def tensorboard(run_path: Path) -> PackageSink:
    """Write event files to `tensorboard/` of the run directory."""
    directory = RunDirectory(run_path)
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(directory.path / "tensorboard"))
    settings = [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in directory.config().settings.items()]
    writer.add_text("config", _markdown(("setting", "value"), settings), 0)

    def write(step: int, values: Sequence[Value]) -> None:
        for name, number in curves_of(values).items():
            writer.add_scalar(name, number, step)
        writer.flush()

    def show(step: int, samples: Sequence[Sample]) -> None:
        writer.add_text("completions", _markdown(COLUMNS, [list(asdict(one).values()) for one in samples]), step)
        writer.flush()

    return PackageSink(write, show, writer.close)


def wandb(run_path: Path) -> PackageSink:
    """Log online or offline, as WANDB_MODE says, to the project that WANDB_PROJECT names."""
    directory = RunDirectory(run_path)
    package = import_module("wandb")
    run = package.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=directory.path.resolve().name,
        dir=str(directory.path),
        id=_unique_name(directory),
        resume="allow",
        config=directory.config().model_dump(mode="json"),
        settings=package.Settings(silent=True, console="off", login_timeout=30),
    )
    # The step of wandb never decreases, but a resumed run repeats steps.
    run.define_metric("*", step_metric="step")
    run.define_metric("train/*", step_metric="train/global_step")

    def write(step: int, values: Sequence[Value]) -> None:
        run.log({"step": step, "train/global_step": step, **curves_of(values)})

    def show(step: int, samples: Sequence[Sample]) -> None:
        rows = [list(asdict(one).values()) for one in samples]
        run.log({"step": step, "completions": package.Table(columns=list(COLUMNS), data=rows)})

    return PackageSink(write, show, run.finish)


def trackio(run_path: Path) -> PackageSink:
    """Log to trackio's database on this machine, to the project that TRACKIO_PROJECT names."""
    directory = RunDirectory(run_path)
    package = import_module("trackio")
    run = package.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=_unique_name(directory),
        config=directory.config().model_dump(mode="json"),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def write(step: int, values: Sequence[Value]) -> None:
        run.log(curves_of(values), step=step)

    def show(step: int, samples: Sequence[Sample]) -> None:
        rows = [list(asdict(one).values()) for one in samples]
        run.log({"completions": package.Table(columns=list(COLUMNS), data=rows)}, step=step)

    return PackageSink(write, show, run.finish)


def mlflow(run_path: Path) -> PackageSink:
    """Log to the server or database of MLFLOW_TRACKING_URI, to the experiment that MLFLOW_EXPERIMENT_NAME names."""
    directory = RunDirectory(run_path)
    client, entities = import_module("mlflow").MlflowClient(), import_module("mlflow.entities")
    run = _mlflow_run(client, entities.Param, directory)
    under_way: list[Any] = []

    def write(step: int, values: Sequence[Value]) -> None:
        now = int(time.time() * 1000)
        numbers = [entities.Metric(name, number, now, step) for name, number in plain_curves_of(values).items()]
        # In a thread of MLflow's, in order: a slow server does not delay the run.
        under_way[:] = [client.log_batch(run, metrics=numbers, synchronous=False)]

    def show(step: int, samples: Sequence[Sample]) -> None:
        rows = [asdict(one) for one in samples]
        client.log_table(run, {column: [row[column] for row in rows] for column in COLUMNS}, "completions.json")

    def close() -> None:
        for last in under_way:
            last.wait()
        client.set_terminated(run)

    return PackageSink(write, show, close)


def _mlflow_run(client: Any, param: Callable[[str, str], object], directory: RunDirectory) -> str:
    """Return the id of this run in MLflow: the one that it began, or a new one."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    mark = _unique_name(directory)
    if begun := client.search_runs([experiment], f"tags.`offbeat.run` = '{mark}'"):
        client.update_run(begun[0].info.run_id, status="RUNNING")
        return str(begun[0].info.run_id)
    begun = client.create_run(experiment, run_name=directory.path.resolve().name, tags={"offbeat.run": mark})
    settings = [param(key, json.dumps(value)) for key, value in directory.config().settings.items()]
    client.log_batch(begun.info.run_id, params=settings)
    return str(begun.info.run_id)


def _unique_name(directory: RunDirectory) -> str:
    """Return a name that a resumed run keeps and that no other run has, even one in a directory of the same name."""
    return re.sub(r"\W", "-", f"{directory.path.resolve().name}-{directory.name}")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; text of a model cannot break out of its cell."""
    lines = [list(columns), ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
