"""What a run depends on beside its settings: its data, the source of rewards and parts of your own, offbeat's release.

Every checkpoint holds their digests. `resume` refuses to continue if one has changed, because rewards before and after
would not compare; `--accept-changes` continues, and the run records what changed. No torch.
"""

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from offbeat import __version__
from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.imports import load_module, load_own, reference
from offbeat.run.directory import RunDirectory
from offbeat.storage.files import write_atomically
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task, make
from offbeat.types import Json

MOST_EXAMPLES: Final = 50_000
"""Of a longer data set, so many examples are read, evenly spread."""
_WORDS: Final = {
    "data": "the data of the task",
    "rewards": "the source of the reward functions",
    "offbeat": "the version of offbeat",
}


def digest_inputs(config: Config) -> dict[str, Json]:
    """Return the digests of a run's inputs as they are now."""
    parts: Json = {part: _digest(_part_files(part)) for _, part in config.own_parts}
    if not config.asks:
        return {"offbeat": __version__, "parts": parts}
    task = make(config.task.name, config.task.options)
    data, rewards = _digest_data(task), _digest_rewards(task.rewards)
    return {"data": data, "rewards": rewards, "offbeat": __version__, "parts": parts}


def keep_sources(directory: RunDirectory, config: Config) -> None:
    """Add the source of each part of your own to the run directory, as it is now, if it is not there yet."""
    kept = directory.part_sources()
    for setting, part in config.own_parts:
        files = _part_files(part)
        text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
        now: dict[str, Json] = {"setting": setting, "part": part, "digest": _digest(files), "source": text}
        if now not in kept:
            kept.append(now)
    if kept:
        directory.parts.mkdir(exist_ok=True)
        write_atomically(directory.sources, json.dumps(kept, indent=1, ensure_ascii=False).encode(), durable=False)


def changed_inputs(before: object, now: Mapping[str, Json]) -> list[str]:
    """Return what differs, in words. Checkpoints of earlier releases hold no digests, so nothing is known to differ.

    >>> changed_inputs({"data": "12", "offbeat": "0.1.0"}, {"data": "34", "offbeat": "0.2.0"})
    ['the data of the task', 'the version of offbeat (0.1.0, now 0.2.0)']
    """
    if not isinstance(before, Mapping):
        return []
    found = []
    for name, words in _WORDS.items():
        if name in before and before[name] != now.get(name):
            versions = f" ({before[name]}, now {now.get(name)})" if name == "offbeat" else ""
            found.append(words + versions)
    parts, theirs = now.get("parts"), before.get("parts")
    if isinstance(parts, Mapping) and isinstance(theirs, Mapping):
        found += [f"the source of {name}" for name, digest in parts.items() if theirs.get(name, digest) != digest]
    return found


def require_same_inputs(directory: RunDirectory, config: Config) -> None:
    """Raise `RunError` if an input has changed since the newest checkpoint of a run."""
    if changed := changed_inputs(_recorded(directory), digest_inputs(config)):
        raise RunError(
            f"{' and '.join(changed)} changed since the newest checkpoint of {directory.path}, so results before and "
            "after would not compare; restore what changed, or continue with `--accept-changes` (in Python: "
            "accept_changes=True)"
        )


def _recorded(directory: RunDirectory) -> object:
    """Return the digests in the newest checkpoint; None if there is none, or if it cannot be read."""
    for manifest in sorted(directory.checkpoints.glob("step-*/manifest.json"), reverse=True):
        try:
            return json.loads(manifest.read_text(encoding="utf-8"))["extras"].get("inputs")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the trainer reports a damaged checkpoint, and uses the one before
    return None


def _digest_data(task: Task) -> str:
    examples, hasher = task.examples, hashlib.sha256()
    count = len(examples)
    hasher.update(f"{count}\n".encode())
    for place in range(0, count, max(1, -(-count // MOST_EXAMPLES))):
        one = examples[place]
        line = json.dumps([one.id, one.record], sort_keys=True, ensure_ascii=True, default=str)
        hasher.update(line.encode() + b"\n")
    return hasher.hexdigest()[:32]


def _digest_rewards(rewards: tuple[Reward, ...]) -> str:
    """Digest the modules that define the rewards, without comments and layout, and the options of each reward."""
    described, modules = [], dict[str, str]()
    for reward in rewards:
        found = reference(reward.function)
        home, _, name = str(found["target"]).rpartition(":")
        described.append([reward.name, reward.weight, reward.trl, name, repr(found["options"])])
        module = sys.modules.get(home)
        if module is not None and not module.__name__.startswith("offbeat."):  # that is the version of offbeat
            modules[Path(module.__name__).name] = _parsed_source(inspect.getsourcefile(module))
    return hashlib.sha256(json.dumps([described, modules], sort_keys=True).encode()).hexdigest()[:32]


def _part_files(reference: str) -> list[str]:
    """Return the files that define a part of your own: the one of its reference, and the one it is imported from."""
    part = load_own(reference)
    home = str(getattr(part, "__module__", "") or type(part).__module__)
    modules: Iterable[ModuleType | None] = (load_module(reference.rpartition(":")[0]), sys.modules.get(home))
    files = [inspect.getsourcefile(one) for one in modules if one and not one.__name__.startswith("offbeat.")]
    return [file for file in dict.fromkeys(files) if file]


def _digest(files: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([_parsed_source(file) for file in files]).encode()).hexdigest()[:32]


def _parsed_source(file: str | None) -> str:
    """Return the syntax tree of a file as text; empty for a module without Python source."""
    try:
        return ast.dump(ast.parse(Path(file or "").read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
