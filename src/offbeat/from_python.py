"""The settings of `offbeat.train(model, reward, dataset, **settings)`: a task file, parts of your own, and their names.

Python objects become text, because other processes and `offbeat resume` cannot see your session: an `Objective` is the
table [objective], and a gate, a rule or an engine is a file with its source in the run directory.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import Config
from offbeat.config.axes import objective_table
from offbeat.config.knobs import place
from offbeat.config.objective import OWN_OBJECTIVE
from offbeat.config.parsing import with_tables
from offbeat.errors import ConfigError, TaskError
from offbeat.imports import missing_modules
from offbeat.objective.spec import Objective
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
    found = dict(settings)
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


def described(settings: Mapping[str, Any], parts: Path | None = None) -> dict[str, Any]:
    """Return the settings as plain data. The source of a gate, rule, sink or engine goes into the folder `parts`."""

    def refer(part: object) -> str:
        if parts is None:
            raise ConfigError(
                [f"{part!r:.80} is an object of this session, which offbeat.train records; here write 'file.py:name'"]
            )
        return _write_part(parts, part)

    return with_tables({name: _described(value, refer) for name, value in placed(settings).items()})


def _described(value: object, refer: Callable[[object], str]) -> Any:
    if isinstance(value, Objective):
        return {"preset": OWN_OBJECTIVE, **objective_table(value, refer)}
    if isinstance(value, Mapping):
        return {key: _described(one, refer) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_described(one, refer) for one in value]
    if value is None or isinstance(value, str | int | float | os.PathLike):
        return value
    return refer(value)


def _write_part(folder: Path, part: object) -> str:
    """Write the source of a part of your own into a file of the folder, and return its reference."""
    from offbeat.tasks.capture import SourceCapture, open_private, refuse_secrets, require_same

    if getattr(part, "__name__", "") == "<lambda>" or not (callable(part) or is_dataclass(part)):
        what = "a lambda" if callable(part) else f"{part!r:.80}"
        kinds = "a function made with `def`, a class, a dataclass or a partial of one"
        raise ConfigError([f"{what} cannot be recorded: give {kinds}"])
    source = SourceCapture(_values={})
    try:
        name = source.use(part, "part")
        text = str(source).lstrip() + "\n"
        refuse_secrets(text)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"part_{len(list(folder.iterdir()))}.py"
        with open_private(path) as file:
            file.write(text)
        require_same(path, name, part)
    except TaskError as error:
        raise ConfigError([str(error)]) from None
    return f"{path}:{name}"


def remove_task(directory: RunDirectory) -> None:
    """Remove what `own_settings` wrote, because the run cannot start."""
    shutil.rmtree(directory.task, ignore_errors=True)
    shutil.rmtree(directory.parts, ignore_errors=True)
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
