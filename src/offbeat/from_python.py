"""The settings of `offbeat.train(model, reward, dataset, **settings)`: a task file, and settings by their own names."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import Config
from offbeat.config.synonyms import place
from offbeat.errors import ConfigError
from offbeat.imports import missing_modules
from offbeat.preflight.forecast import ModelFiles
from offbeat.run.directory import RunDirectory

if TYPE_CHECKING:
    from offbeat.tasks.capture import RewardFunction


def own_settings(
    directory: RunDirectory,
    model: object,
    reward: "RewardFunction | Sequence[RewardFunction] | None",
    dataset: object,
    *,
    eval_dataset: object,
    reward_range: tuple[float, float],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the task into the run directory, and return settings for a configuration that uses it.

    Without vLLM, and for a tiny model, transformers generates, so a first run needs only what training needs. It is
    evaluated on held-out rows before, after and up to three times between, unless `evaluation.every` says otherwise,
    with at most a quarter of the answers that it trains on.
    """
    if reward is None or dataset is None:
        missing = "reward" if reward is None else "dataset"
        raise ConfigError([f"{missing} is missing: offbeat.train(model, reward, dataset) takes all three"])
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            [f"model = {model!r:.80} must be the directory of a model, or its name on the hub: owner/name"]
        )
    from offbeat.tasks.capture import write_task

    task = write_task(directory.task, reward, dataset, eval_dataset, reward_range)
    found = placed(settings)
    found["model"] = {**found.get("model", {}), "path": os.fspath(model)}
    found["task"] = {**found.get("task", {}), "name": str(task)}
    if "kind" not in found.get("engine", {}) and (missing_modules(["vllm"]) or ModelFiles(Path(model)).tiny):
        found["engine"] = {**found.get("engine", {}), "kind": "hf"}
    if "every" not in found.get("evaluation", {}):
        steps = int(found.get("steps", Config().steps))
        parts = next(parts for parts in (4, 3, 2, 1) if steps % parts == 0)  # so that the last step is evaluated
        found["evaluation"] = {**found.get("evaluation", {}), "every": max(1, steps // parts)}
        if "prompts" not in found["evaluation"]:
            found["evaluation"]["prompts"] = _fitting(found, steps, parts + 1)
    return found


def _fitting(settings: Mapping[str, Any], steps: int, evaluations: int) -> int:
    """Return how many prompts to ask in each evaluation of a run: fewer in a short run, but at least 8."""
    default = Config()
    trained = steps * int(settings.get("prompts_per_step", default.prompts_per_step))
    trained *= int(settings.get("group_size", default.group_size))
    samples = int(settings["evaluation"].get("samples", default.evaluation.samples))
    return min(default.evaluation.prompts, max(8, trained // (4 * evaluations * samples)))


def remove_task(directory: RunDirectory) -> None:
    """Remove what `own_settings` wrote, because the run cannot start."""
    shutil.rmtree(directory.task, ignore_errors=True)
    if [entry.name for entry in directory.path.iterdir()] == [directory.lock.name]:
        shutil.rmtree(directory.path)


def placed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings that are given by their own names, or by TRL's, into their sections.

    >>> placed({"num_generations": 8, "learning_rate": 1e-6, "sync": {"every": 4}})
    {'group_size': 8, 'optimizer': {'learning_rate': 1e-06}, 'sync': {'every': 4}}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, leaf = (place(name) or name).rpartition(".")
        if not section:
            both = isinstance(value, Mapping) and isinstance(found.get(leaf), Mapping)
            found[leaf] = {**found[leaf], **value} if both else value
        else:
            found[section] = {**found.get(section, {}), leaf: value}
    return found
