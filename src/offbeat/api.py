"""The public Python API: check, train, resume, evaluate, report, and `Run`. `offbeat/__init__.py` lists all of it.

    run = offbeat.train("Qwen/Qwen2.5-0.5B-Instruct", reward, rows, steps=100)
    run.metrics["reward_mean"]

The command line calls the same functions. No torch until a run starts.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import Config, examine
from offbeat.config.objective import OWN_OBJECTIVE
from offbeat.config.parsing import TomlFile, key_paths, with_tables
from offbeat.drive import Callback, drive
from offbeat.errors import ConfigError, HubError, RunError
from offbeat.from_python import described, own_settings, remove_task
from offbeat.hub import find_model, hub_name
from offbeat.imports import paused_collector
from offbeat.reports.run import Run
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.event_loop import outside_event_loop
from offbeat.working import TICK, Working

if TYPE_CHECKING:
    from offbeat.evaluation import EvaluationRow
    from offbeat.tasks.capture import RewardFunction
    from offbeat.tasks.task import Task
    from offbeat.types import Json

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
    from offbeat.preflight.checks import device_plan, lag_findings

    config = checked(source, settings, gpus=gpus)
    lines = [config.plan, *([str(device_plan(config, gpus))] if gpus is not None else [])]
    return "\n".join([*lines, *(f"warning: {finding.text}" for finding in lag_findings(config))])


def train(
    source: "Source | None" = None,
    /,
    reward: "RewardFunction | Sequence[RewardFunction] | None" = None,
    dataset: object = None,
    *,
    model: "Source | None" = None,
    reward_funcs: "RewardFunction | Sequence[RewardFunction] | None" = None,
    train_dataset: object = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    eval_dataset: object = None,
    reward_range: tuple[float, float] = (-math.inf, math.inf),
    **settings: Any,
) -> Run:
    """Train and return the finished `Run`: `offbeat.train(model, reward, dataset)`, or `offbeat.train("run.toml")`.

    >>> def correct(completions, answer, **columns):
    ...     return [float(text.strip() == right) for text, right in zip(completions, answer)]
    >>> rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
    >>> run = offbeat.train("owner/name", correct, rows, steps=100, learning_rate=1e-6)  # doctest: +SKIP

    The first interrupt (Ctrl-C, or "interrupt kernel" in a notebook) ends the run after its current step with a
    checkpoint; `resume` continues from there.

    Args:
        source: The directory of a model, or its name on the hub, `owner/name`. Without `reward`: a whole configuration,
            which is a `Config`, a dictionary or the path of a TOML file.
        reward: A reward function or several, with TRL's arguments, `(completions, **columns)`, or with the arguments
            `(text, columns)`; the directory of a reward model; with a weight as `Reward(function, weight=0.5)`.
        dataset: A list of dictionaries with a 'prompt' (text or messages) and the columns that `reward` takes; a JSONL
            or Parquet file; a `datasets.Dataset`, or a `DatasetDict` whose test split is evaluated on.
        model, reward_funcs, train_dataset: The same three as keywords, two of them by TRL's names.
        out: The run directory. Default: `runs/` and the name of the TOML file, or the time of day.
        progress: Show a progress display in a terminal or notebook, plain lines elsewhere.
        callbacks: Functions that are called with every event of the run, a dictionary with its `kind` and `step`. One
            that returns a text ends the run after its step.
        eval_dataset: Evaluate on these rows, and train on all of `dataset`. Default: some rows are held out.
        reward_range: A reward outside ends the run. Default: rewards are not limited.
        settings: Any setting of the configuration: `steps=100, sync={"every": 10}`, or by its own name if that is
            unique, `learning_rate=1e-6`. A lag that is known to lose needs `accept=True`. Parts of your own, too:
            `objective=Objective(gate=my_gate)`, `cadence=MyRule`, `sinks=[MySink]`, `engine={"kind": MyEngine}`; the
            run directory keeps their source.
    """
    reward = _one("reward", reward, "reward_funcs", reward_funcs)
    dataset = _one("dataset", dataset, "train_dataset", train_dataset)
    if isinstance(model, Mapping) or (model is not None and reward is None and dataset is None):  # a section
        settings["model"] = model if isinstance(model, Mapping) else {"path": model}
    else:
        source = _one("model", source, "model=", model)
    directory = RunDirectory(Path(out) if out is not None else _default_directory(source if reward is None else None))
    with Working("checking the configuration", quiet=not progress), paused_collector():  # to run, it loads torch
        lock = directory.claim()
        try:
            plain = described(settings, directory.parts)
            if reward is not None or dataset is not None:
                plain = own_settings(
                    directory, source, reward, dataset, eval_dataset=eval_dataset, reward_range=reward_range,
                    settings=plain,
                )  # fmt: skip
                source = None
            config = checked(source, plain, to_run=True)
            directory.record(config)
        except BaseException:
            remove_task(directory)
            lock.release()
            raise
    if progress:
        print(config.plan)
    return _drive(config, directory, lock, progress, callbacks)


def _one(name: str, given: Any, other: str, also: Any) -> Any:
    if given is not None and also is not None:
        raise ConfigError([f"{name} is given twice, also as {other}; leave one of them out"])
    return also if given is None else given


def resume(
    run: Run | str | os.PathLike[str],
    *,
    steps: int | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    accept_changes: bool = False,
    settings: Sequence[str] = (),
    from_step: int | None = None,
) -> Run:
    """Continue a run from its newest checkpoint, up to `steps` if given, and return it. See `train` for `callbacks`.

    If the task's data, a reward function or offbeat itself has changed since that checkpoint, it raises `RunError`;
    with `accept_changes` the run continues and records what changed. Lost checkpoints raise `CheckpointDamaged`.
    `settings` may change the optimizer, ["optimizer.learning_rate=1e-7"], and `from_step` is the step of an earlier
    checkpoint.
    """
    from offbeat.run.directory import prepare_resume

    opened = run if isinstance(run, Run) else Run(run)
    with Working("looking at the newest checkpoint", quiet=not progress, after=TICK):
        config, lock = prepare_resume(opened.directory, settings, from_step, accept_changes=accept_changes)
    config = config.model_copy(update={"steps": steps}) if steps else config
    return _drive(config, opened.directory, lock, progress, callbacks)


def _drive(
    config: Config, directory: RunDirectory, lock: RunLock, progress: bool, callbacks: Sequence[Callback]
) -> Run:
    done = drive(config, directory, lock, progress=progress, callbacks=callbacks)
    if progress and done.why:
        again = "" if done.finished else f"; continue with offbeat.resume({str(directory.path)!r})"
        print(f"the run ended early: {done.why}{again}")
    return Run(directory.path)


def evaluate(
    source: Run | str | os.PathLike[str],
    task: "Task | str | None" = None,
    *,
    options: Mapping[str, Any] | None = None,
    prompts: int | None = None,
    samples: int = 8,
    k: Sequence[int] = (),
    temperature: float = 1.0,
    greedy: bool = True,
    before: bool = True,
    max_tokens: int | None = None,
    seed: int = 0,
    slice_by: str | None = None,
    correct_at: float = 1.0,
    workers: int = 2,
    chat_template_kwargs: "Mapping[str, Json] | None" = None,
    progress: bool = True,
) -> "list[EvaluationRow]":
    """Return pass@1, pass@k and maj@k with 95 % intervals, one row per slice of the task.

    A run is asked prompts that it held out, and its base model the same ones; `held_out` of a row says so.

    Args:
        source: A run (its newest policy), a model directory, or the name of a model on the hub, `owner/name`.
        task: A task, its name, or the path of a task file. Default: what the run evaluates on.
        options: Settings of the task, where it is given by name.
        prompts: Distinct prompts to ask. Default: as many as the run, or 64.
        samples: Completions of each prompt, more if there are fewer prompts than asked for.
        k: For pass@k and maj@k. Default: `samples`.
        temperature: 0 is greedy.
        greedy: Add a greedy completion of each prompt: `greedy pass@1`.
        before: Of a run, evaluate the model that it started from too: `before` and `difference` of each row.
        max_tokens: Longest completion. Default: as in the run, or 256.
        seed: Of sampling.
        slice_by: The column that splits the prompts into rows. Default: that of the task.
        correct_at: A completion with at least this reward is correct.
        workers: Scoring processes.
        chat_template_kwargs: Values for variables of the chat template. Default: as in the run.
        progress: Say how many answers are asked for, and how many prompts have theirs.
    """
    with Working("loading torch", quiet=not progress) as working:
        with paused_collector():
            from offbeat.run.evaluation.model import EvaluationSettings, evaluate_model, evaluate_run

        working.next("loading the model")
        asked = EvaluationSettings(
            prompts, samples, tuple(k), temperature, greedy, before, max_tokens, seed, slice_by, correct_at, workers,
            chat_template_kwargs, working.say, working.next,
        )  # fmt: skip
        place = source.path if isinstance(source, Run) else Path(source)
        if (directory := RunDirectory(place)).events.exists():
            other = None if task is None else _task(task, options or {})
            return outside_event_loop(lambda: evaluate_run(directory, other, asked))
        chosen = _task(task, options or {})
        return outside_event_loop(lambda: evaluate_model(str(place), chosen, asked))


def report(
    *runs: Run | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    names: Sequence[str] = (),
) -> Path:
    """Write the HTML report of one run, or of several compared, and return its path.

    Runs that differ only in their seed are pooled. `names` are shown instead of the names of the directories.
    """
    if not runs:
        raise RunError("give at least one run: offbeat.report('runs/one')")
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    to = Path(out) if out is not None else paths[0] / "report.html" if len(paths) == 1 else Path("report.html")
    with Working("writing the report", after=TICK):
        from offbeat.reports.page import write_report

        write_report(paths, to, names)
    return to


def tiny_model(directory: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Make the model of the quickstart, unless `directory` has it already, and return its path.

    It has 0.1 M parameters and writes one-digit sums. Its most probable answer is wrong, four in ten sampled answers
    are right. Takes about ten seconds.
    """
    path = Path(directory)
    if not (path / "config.json").exists():
        with Working("making a tiny model: loading torch", quiet=not progress) as working:
            with paused_collector():
                from offbeat.run.quickstart import make_model

            working.next("making a tiny model: pre-training")
            make_model(path, say=lambda line: None)
    return path


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
    file, settings = None, described(settings)
    if isinstance(source, str | os.PathLike):
        file = TomlFile.read(Path(source), overrides)
        data = file.data
        if settings:
            file = replace(file, set_keys=frozenset(key_paths(settings)), set_by="keyword")
    else:
        data = source.model_dump(mode="json") if isinstance(source, Config) else with_tables(source or {})
    if settings.get("objective", {}).get("preset") == OWN_OBJECTIVE:
        data = {**data, "objective": {}}  # an `Objective` is whole: nothing of the file changes it
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


def _task(task: "Task | str | None", options: "Mapping[str, Json]") -> "Task":
    from offbeat.tasks.task import make

    if task is None:
        raise ConfigError(["task: a model has no task of its own; give one, for example task='gsm8k'"])
    return make(task, dict(options)) if isinstance(task, str) else task
