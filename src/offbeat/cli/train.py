"""`offbeat train`, `resume` and `worker`: run the loop with the live view, or generate for it from elsewhere."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from offbeat.cli.check import Accept, Settings, checked
from offbeat.cli.terminal import plain_errors, printable, stopped_by_ctrl_c
from offbeat.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.rollout.worker import Worker
    from offbeat.run.directory import RunDirectory, RunLock


def train(
    config: Annotated[Path, typer.Argument(help="The TOML file of the run")],
    out: Annotated[Path | None, typer.Option(help="The run directory; default: runs/<name of the file>")] = None,
    settings: Settings = None,
    accept: Accept = False,
) -> None:
    """Train a model: `offbeat train run.toml --set sync.every=10`. Ctrl-C stops after the step, with a checkpoint."""
    parsed = checked(config, [*(settings or []), *(["accept=true"] if accept else [])], to_run=True)
    from offbeat.run.directory import RunDirectory

    directory = RunDirectory(out or Path("runs") / config.stem)
    with stopped_by_ctrl_c(_proceed(directory)):
        with plain_errors(code=2):
            lock = directory.create(parsed)
        typer.echo(parsed.plan)
        drive(parsed, directory, lock)
        _print_next(directory)


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory")],
    steps: Annotated[int, typer.Option(min=0, help="Train until this step; 0: as configured")] = 0,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue although task data, rewards or offbeat changed")
    ] = False,
    settings: Settings = None,
    from_step: Annotated[int | None, typer.Option(min=0, help="Go back to the checkpoint of this step")] = None,
) -> None:
    """Resume a run from its last checkpoint: `offbeat resume runs/one`. `--set` may change the optimizer's settings."""
    from offbeat.run.directory import RunDirectory, prepare_resume

    directory = RunDirectory(run)
    with plain_errors(code=2), Working("looking at the newest checkpoint", after=SOON):
        config, lock = prepare_resume(directory, settings or [], from_step, accept_changes=accept_changes)
    with stopped_by_ctrl_c(_proceed(directory)):
        drive(config.model_copy(update={"steps": steps}) if steps else config, directory, lock)
        _print_next(directory)


def drive(config: "Config", directory: "RunDirectory", lock: "RunLock") -> None:
    """Run to the end with the live view, then print the ledger and where the run is."""
    from offbeat.drive import drive

    with plain_errors(_proceed(directory)):
        done = drive(config, directory, lock)
    typer.echo(str(done.ledger))
    if done.why:
        typer.echo(f"the run ended early: {done.why}")
    typer.echo(f"the run is in {directory.path}" + ("" if done.finished else f"; {_proceed(directory)}"))


def _proceed(directory: "RunDirectory") -> str:
    return f"continue with `offbeat resume {directory.path}`"


def _print_next(directory: "RunDirectory") -> None:
    """Print the two commands that people type next."""
    typer.echo(
        f"\nlook at the curves     offbeat report {directory.path}\n"
        f"look at the answers    offbeat view {directory.path}"
    )


def worker(
    run: Annotated[Path, typer.Argument(help="A run directory, or the TOML file the run was started with")],
    settings: Settings = None,
    name: Annotated[str, typer.Option(help="Unique among the run's workers; default: host name and process id")] = "",
    groups: Annotated[int, typer.Option(min=0, help="Stop after this many groups; 0: run until interrupted")] = 0,
    per_version: Annotated[
        int,
        typer.Option(min=0, help="Groups to generate per version before waiting; 0: what the run can train in time"),
    ] = 0,
    slots: Annotated[int, typer.Option(min=1, help="On Ray: workers this machine has room for")] = 1,
) -> None:
    """Generate, score and append groups for a run: `offbeat worker runs/one`.

    The run's own configuration says which model, task, engine and sampling to use. `--set` overrides it for this
    machine, for example `--set model.path=/data/model`. The worker reads policies from the run's weight log, checks
    each against its probe before it writes a group, and appends to the run's experience log. It may join and leave at
    any time. Ctrl-C returns the prompts it has begun and ends. So does the end of the run, or two minutes without its
    driver.

    If the run is on Ray, this machine joins its cluster and the run starts the workers.
    """
    from offbeat.errors import RunError
    from offbeat.reports.history import RunState, read_history, state_of

    with plain_errors(code=2):
        config, directory = _find_run(run, settings or [])
        if config.run.place == "ray":
            _join_ray(directory, slots)
        if state_of(directory, read_history(directory), config.steps) is RunState.FINISHED:
            raise RunError(f"{directory.path} has finished: there is nothing to generate for")
    if config.run.mode == "lockstep":
        typer.echo("this run is in lockstep mode: with groups from outside it does not repeat bit for bit", err=True)
    _serve(config, directory, name, groups, per_version or _in_time(config))


def _find_run(run: Path, settings: list[str]) -> "tuple[Config, RunDirectory]":
    """Return the configuration and directory of a run, given either its directory or its TOML file."""
    from offbeat.config import load
    from offbeat.run.directory import RunDirectory

    if run.suffix == ".toml":
        return load(run, settings), RunDirectory(Path("runs") / run.stem)
    directory = RunDirectory(run)
    return directory.config(settings), directory


def _in_time(config: "Config") -> int:
    """Return how many groups of one version a run trains before the next, or before they are too old."""
    return min(config.fresh * config.longest, config.prompts_per_step * (config.fresh_lag + 1))


def _serve(config: "Config", directory: "RunDirectory", name: str, groups: int, per_version: int) -> None:
    import asyncio
    import os
    import socket

    from transformers import AutoConfig

    from offbeat.rollout.prompt_leases import LocalPrompts, PerVersion, PromptLeases
    from offbeat.run.build import RunContext, load_tokenizer, make_task, make_worker, open_pool
    from offbeat.run.desk import FittingPrompts
    from offbeat.run.engines import start_engine

    name = name or f"{socket.gethostname()}-{os.getpid()}"
    context = RunContext(config, directory, make_task(config), load_tokenizer(config))
    task = context.task
    model = config.model.directory()
    vocabulary = AutoConfig.from_pretrained(str(model), local_files_only=True).vocab_size
    order = FittingPrompts(
        config, task, context.tokenizer, ("worker", name), lambda _, why: typer.echo(printable(why), err=True)
    )
    leases = PromptLeases(order, name=f"{name}-{os.getpid()}", seed=config.seed, seconds=config.workers.lease_seconds)
    prompts = PerVersion(LocalPrompts(leases), per_version)
    with (
        context.open_log(vocabulary, name) as log,
        open_pool(config, task) as pool,
        context.subscribe(name) as policies,
    ):
        made = make_worker(context, name, prompts, pool, log, policies, partial(start_engine, config))
        why = asyncio.run(_work(made, groups, directory))
        tally = made.tally
        typer.echo(
            f"{tally.groups} groups, {tally.tokens} tokens, {tally.loads} versions loaded, "
            f"{tally.discarded} groups discarded, {tally.starts} engine starts" + (f"; {why}" if why else "")
        )


def _join_ray(directory: "RunDirectory", slots: int) -> NoReturn:
    """Replace this process by a Ray node of the run's cluster, until it is interrupted."""
    import os

    from offbeat.run.ray.entry import join_command

    command = join_command(directory, slots)
    os.execvp(command[0], command)


DRIVER_GONE: Final = 120.0
"""A worker ends after so many seconds without a driver: a run that crashed may be resumed before that."""


def _why_over(directory: "RunDirectory", joined: float) -> str:
    """Say why a worker has no run to generate for; empty if it has one."""
    from offbeat.run.journal import read

    heartbeat = directory.lock.stat().st_mtime if directory.lock.exists() else 0.0
    if (silent := time.time() - max(joined, heartbeat)) < 3:  # the driver touches the file every second
        return ""
    events = read(directory.events) if directory.events.exists() else ()
    if any(one["kind"] == "ended" and float(str(one["at"])) > joined for one in events):
        return "the run has ended"
    return f"the run has had no driver for {silent:.0f} s" if silent > DRIVER_GONE else ""


async def _work(worker: "Worker", groups: int, directory: "RunDirectory") -> str:
    """Run until interrupted, until `groups` are written, or until the run is over; then return why. Print problems."""
    import asyncio
    import signal

    joined, looked, why = time.time(), time.time(), ""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, worker.stop)
    running = asyncio.create_task(worker.run())
    printed, version = 0, None
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        for notice in worker.tally.notices[printed:]:
            typer.echo(printable(notice), err=True)
        printed = len(worker.tally.notices)
        if worker.version != version and worker.version is not None:
            version = worker.version
            typer.echo(f"serving version {version}: {worker.verdict}")
        if groups and worker.tally.groups >= groups:
            worker.stop()
        if not why and time.time() > looked + 2:
            looked, why = time.time(), await asyncio.to_thread(_why_over, directory, joined)
            if why:
                worker.stop()
    await running
    return why
