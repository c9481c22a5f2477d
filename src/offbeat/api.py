"""The public Python API: check, train, resume, evaluate, report, and `Run`. `offbeat/__init__.py` lists all of it.

    run = offbeat.train("run.toml", steps=100)
    run.metrics()["reward_mean"]

The command line calls the same functions. No torch until a run starts.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from offbeat.config import Config, examine
from offbeat.config.toml_file import TomlFile, key_paths
from offbeat.errors import ConfigError, HubError, RunError
from offbeat.hub import find_model, hub_name, model_directory
from offbeat.reports.run import Run
from offbeat.run.directory import RunDirectory, RunLock

if TYPE_CHECKING:
    from offbeat.evaluation import EvaluationRow
    from offbeat.experience.ledger import Ledger
    from offbeat.run.loop import Loop
    from offbeat.tasks.task import Task
    from offbeat.types import Json

Result = TypeVar("Result")
TINY: Final = 1_000_000
"""Parameters below which a second thread does not pay."""
Source = Config | Mapping[str, Any] | str | os.PathLike[str]
"""A configuration: a `Config`, a dictionary, or the path of a TOML file."""


def load_config(source: Source | None = None, /, **settings: Any) -> Config:
    """Return a configuration from a path, a dictionary or keywords; keywords go over what `source` says.

    Raises `ConfigError` with every problem at once; problems in a file come with their line.

    >>> load_config(prompts_per_step=32, group_size=8, sync={"every": 10}).plan
    '32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9'
    >>> load_config(group_sise=8)
    Traceback (most recent call last):
    offbeat.errors.ConfigError: - group_sise is not a setting; did you mean 'group_size'?
    """
    return _load(source, settings)


def check(source: Source | None = None, /, *, gpus: str | None = None, **settings: Any) -> str:
    """Return what a configuration will do, in words, or raise `ConfigError` with everything that prevents it.

    Checks what is outside the file too: model files, data, installed extras, memory. With `gpus`, for instance "8x80",
    it plans the run for that hardware, and the result has the device plan.
    """
    from offbeat.preflight.checks import device_plan

    config = checked(source, settings, gpus=gpus)
    return config.plan if gpus is None else f"{config.plan}\n{device_plan(config, gpus)}"


def train(
    source: Source | None = None,
    /,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train and return the finished `Run`.

    The first interrupt (Ctrl-C, or "interrupt kernel" in a notebook) ends the run after its current step with a
    checkpoint; `resume` continues from there.

    Args:
        source: A `Config`, a dictionary, or the path of a TOML file. Leave it out to give keywords only.
        out: The run directory. Default: `runs/` and the name of the TOML file, or the time of day.
        progress: Show a progress display in a terminal or notebook, plain lines elsewhere.
        settings: Any setting of the configuration, for example `steps=100, sync={"every": 10}`.
    """
    config = checked(source, settings, to_run=True)
    directory = RunDirectory(Path(out) if out is not None else _default_directory(source))
    directory.create(config)
    drive(config, directory, progress=progress)
    return Run(directory.path)


def resume(run: Run | str | os.PathLike[str], *, steps: int | None = None, progress: bool = True) -> Run:
    """Continue a run from its newest checkpoint, up to `steps` if given, and return it."""
    opened = run if isinstance(run, Run) else Run(run)
    config = opened.config
    with RunLock(opened.directory):  # fails before anything heavy is imported
        pass
    drive(config.model_copy(update={"steps": steps}) if steps else config, opened.directory, progress=progress)
    return opened


def evaluate(
    source: Run | str | os.PathLike[str],
    task: "Task | str | None" = None,
    *,
    options: Mapping[str, Any] | None = None,
    prompts: int = 64,
    samples: int = 8,
    k: Sequence[int] = (),
    temperature: float = 1.0,
    max_tokens: int = 256,
    seed: int = 0,
) -> "list[EvaluationRow]":
    """Return pass@1, pass@k and maj@k with 95 % intervals, one row per slice of the task.

    Args:
        source: A `Run` (its newest policy), a model directory, or the name of a model on the hub, `owner/name`.
        task: A task, its name, or the path of a task file. Default: the task of the run.
        options: Settings of the task, where it is given by name.
        prompts: Prompts to ask.
        samples: Completions of each prompt.
        k: For pass@k and maj@k. Default: `samples`.
        temperature: 0 is greedy.
        max_tokens: Longest completion.
        seed: Of prompts, sampling and bootstrap.
    """
    from offbeat.evaluation import evaluate as estimate
    from offbeat.rollout.hf import HfEngine
    from offbeat.run.evaluation import ModelSampler, load_model, sample_attempts, sampling_for

    chosen = _task(task, options or {}, source)
    if isinstance(source, Run):
        model, tokenizer = source.policy(), source.tokenizer()
        sampler = ModelSampler(HfEngine(model), tokenizer, sampling_for(model, tokenizer, temperature, max_tokens))
    else:
        sampler = load_model(os.fspath(source), temperature=temperature, max_tokens=max_tokens)
    attempts = _outside_event_loop(
        lambda: list(
            sample_attempts(sampler, chosen, chosen.slice_by, prompts=prompts, samples=samples, seed=seed, workers=2)
        )
    )
    return estimate(attempts, list(k) or [samples], seed=seed)


def report(*runs: Run | str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the HTML report of one run, or of several compared, and return its path."""
    from offbeat.reports.page import write_report

    if not runs:
        raise RunError("give at least one run: offbeat.report('runs/one')")
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    to = Path(out) if out is not None else paths[0] / "report.html" if len(paths) == 1 else Path("report.html")
    write_report(paths, to)
    return to


def tiny_model(directory: str | os.PathLike[str]) -> Path:
    """Make the model of the quickstart, unless `directory` has it already, and return its path.

    It has 0.1 M parameters, writes one-digit sums and gets six in ten of them wrong. Takes about ten seconds.
    """
    from offbeat.run.quickstart import make_model

    path = Path(directory)
    if not (path / "config.json").exists():
        make_model(path, say=lambda line: None)
    return path


def drive(config: Config, directory: RunDirectory, *, progress: bool = True) -> "tuple[Ledger, bool]":
    """Run to the last step; returns the ledger, and whether the last step was reached."""
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from offbeat.preflight.gpu.once import require_checked_gpu
    from offbeat.reports.live import LiveView

    if config.run.place == "ray":
        from offbeat.run.ray.entry import train as run
    else:
        from offbeat.run.local import train as run

    require_checked_gpu(lambda line: print(line, file=sys.stderr))
    model_directory(config.model.path, config.model.revision)  # a download shows its progress before the view starts
    disable_progress_bar()  # the view has its own
    loops: list[Loop] = []
    console = Console(quiet=not progress)
    with LiveView(config, console) as view, _stop_on_interrupt(loops), _fitting_threads(config):
        ledger = _outside_event_loop(lambda: run(config, directory, watching=view, started=loops.append))
    return ledger, not loops or loops[-1].learner.step >= config.steps


@contextmanager
def _fitting_threads(config: Config) -> Iterator[None]:
    """Train a tiny model on one CPU thread: with such small matrices a second one costs more than it saves."""
    import torch

    from offbeat.preflight.forecast import ModelFiles

    before = torch.get_num_threads()
    if (ModelFiles(model_directory(config.model.path, config.model.revision)).parameters or TINY) < TINY:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _stop_on_interrupt(loops: "list[Loop]") -> Iterator[None]:
    """Let the first interrupt end the run after its step, and the second end it at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return

    def stop(number: int, frame: object) -> None:
        print("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for loop in loops:
            loop.stop("interrupted")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _outside_event_loop(run: Callable[[], Result]) -> Result:
    """Call `run`, which starts an event loop of its own; in a notebook one is running already, so use a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def checked(
    source: Source | None,
    settings: Mapping[str, Any],
    overrides: Sequence[str] = (),
    gpus: str | None = None,
    *,
    to_run: bool = False,
) -> Config:
    """Return a configuration that can run here, or on other `gpus` such as "8x80".

    `overrides` are texts such as "sync.every=10" for a TOML file. With `to_run`, it must fit on this machine's GPUs,
    which torch is asked for; so it is known before anything large is downloaded.
    """
    from offbeat.placement.hardware import Hardware
    from offbeat.preflight.checks import check_devices, preflight

    def problems(config: Config) -> list[str]:
        found = preflight(config, here=gpus is None)
        hardware = Hardware.parse(gpus) if gpus is not None else None
        if to_run and config.run.place == "local":  # a Ray cluster is asked when the run starts
            hardware = Hardware.detect()
        return found if found or hardware is None else check_devices(config, hardware)

    return _pinned(_load(source, settings, overrides, also=problems))


def _pinned(config: Config) -> Config:
    """Return the configuration with the commit of a model of the hub as its revision."""
    if hub_name(config.model.path) is None:
        return config
    try:
        commit = find_model(config.model.path, config.model.revision).commit
    except HubError as error:
        raise ConfigError([f"model.path = {config.model.path!r}: {error}"]) from error
    return config.model_copy(update={"model": config.model.model_copy(update={"revision": commit})})


def _load(
    source: Source | None,
    settings: Mapping[str, Any],
    overrides: Sequence[str] = (),
    also: Callable[[Config], list[str]] = lambda config: [],
) -> Config:
    file = None
    if isinstance(source, str | os.PathLike):
        file = TomlFile.read(Path(source), overrides)
        data = file.data
        if settings:
            file = replace(file, set_keys=frozenset(key_paths(settings)), set_by="keyword")
    else:
        data = source.model_dump(mode="json") if isinstance(source, Config) else source or {}
    examined = examine(_merged(data, settings))
    examined = examined.also(also(examined.config))
    if examined.problems:
        raise ConfigError(file.located(examined.problems) if file else examined.problems)
    return examined.config


def _merged(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the values of `over`; sections are merged key by key."""
    merged: dict[str, Any] = _plain(dict(data))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else _plain(value)
    return merged


def _plain(value: Any) -> Any:
    """Paths as text, also inside a section."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _default_directory(source: Source | None) -> Path:
    if isinstance(source, str | os.PathLike):
        return Path("runs") / Path(source).stem
    return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def _task(task: "Task | str | None", options: "Mapping[str, Json]", source: object) -> "Task":
    from offbeat.run.build import make_task
    from offbeat.tasks.task import make

    if task is None:
        if not isinstance(source, Run):
            raise ConfigError(["task: a model has no task of its own; give one, for example task='gsm8k'"])
        return make_task(source.config)
    if isinstance(task, str):
        return make("custom", {**options, "path": task}) if task.endswith(".py") else make(task, dict(options))
    return task
