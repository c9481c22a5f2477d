"""Judge pairs of preset and data as `offbeat check` does, and follow its advice.

What the data must have is not taken from the code under test: a formula needs the behavior policy's log-probs if its
gradient changes with them.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final

import torch

from offbeat.config import examine
from offbeat.config.known import Doubt
from offbeat.objective.presets import PRESETS
from offbeat.preflight.checks import LogContents, lag_evidence, log_problems
from offbeat.types import Json
from tests.fixtures.lagged_batches import LaggedBatch

Settings = dict[str, Any]
GROUPS: Final = 4
MODES: Final[Mapping[str, Settings]] = {
    "lockstep": {},
    "every 10": {"sync": {"every": 10}},
    "every 200": {"sync": {"every": 200}},
    "offset": {"sync": {"offset": 9}},
    "i = 4": {"sync": {"every": 4}, "updates_per_batch": 4},
    "drift": {"sync": {"drift_budget": 0.05}},
    "cost": {"sync": {"by_cost": True}},
    "concurrent": {"run": {"mode": "concurrent", "max_lag": 9}},
    "replay": {"sampler": {"mode": "replay"}},
    "concurrent replay": {"run": {"mode": "concurrent", "max_lag": 9}, "sampler": {"mode": "replay"}},
    "offline": {"run": {"mode": "offline"}, "sampler": {"mode": "offline"}},
}
RATES: Final = (1e-6, 5e-6, 1e-3)
SIZES: Final = {"90 k": 9e4, "135 M": 1.35e8}
"""Of the model."""


NOTHING: Final = LogContents()


@dataclass(frozen=True)
class Data:
    """What an experience log holds, and where it is."""

    logprobs: str
    """Which groups have them: all, some or none."""
    versions: bool
    graded: bool
    """False if the scores come later."""
    uri: str = ""
    contents: LogContents = NOTHING


NO_LOG: Final = Data("all", True, True)


@dataclass(frozen=True)
class Judged:
    """What check says about a configuration: what refuses it, what is known to lose, and what is only a warning."""

    refused: Sequence[str] = ()
    loses: str = ""
    warning: str = ""
    row: str = ""

    @property
    def runs(self) -> bool:
        return not self.refused and not self.loses

    @property
    def level(self) -> str:
        if self.refused:
            return "refused"
        return "known to lose" if self.loses else "nobody has shown it" if self.warning else "nothing said"


def judge(settings: Settings, data: Data, parameters: float) -> Judged:
    """Judge as `offbeat check` does."""
    return _judge(json.dumps(settings).replace(data.uri or "no log", "log"), data.contents, parameters)


@cache
def _judge(settings: str, contents: LogContents, parameters: float) -> Judged:
    """Judge settings in JSON: logs with the same contents are judged once."""
    examined = examine(json.loads(settings))
    refused = [*examined.problems, *log_problems(examined.config, contents, parameters)]
    finding = lag_evidence(examined.config, contents, parameters).finding()
    if finding is None:
        return Judged(refused)
    if finding.level is Doubt.UNSHOWN:
        return Judged(refused, warning=finding.text, row=finding.row)
    return Judged(refused, loses="" if examined.config.accept else finding.text, row=finding.row)


@cache
def needs_logprobs(preset: str) -> bool:
    """True if the gradient of an objective changes with the behavior policy's log-probs."""
    objective, batch = PRESETS[preset].objective, LaggedBatch.draw(0, 2)
    moved = replace(
        batch,
        behavior_NT=batch.behavior_NT + torch.linspace(-1, 1, batch.behavior_NT.numel()).view_as(batch.behavior_NT),
    )
    return not torch.equal(batch.gradient(objective), moved.gradient(objective))


def allowed(preset: str, mode: str, data: Data) -> bool:
    """True if the run can compute its loss: the formula needs no log-probs, or some of its data have them."""
    only_from_log = "offline" in mode or "replay" in mode
    return not (needs_logprobs(preset) and only_from_log and data.uri and data.logprobs == "none")


def advice(sentence: str) -> Iterator[tuple[str, Json]]:
    """Yield each change that a sentence names, as a setting and its new value; None removes it."""
    for key, value in re.findall(r"set ([\w.]+) = ('[^']*'|\[[^]]*\]|[^\s,;]+)", sentence):
        yield key, tomllib.loads(f"value = {value}")["value"]
    for names in re.findall(r"choose one of ([\w-]+(?:, [\w-]+)*)", sentence):
        for name in names.replace(", which need none", "").split(", "):
            if name in PRESETS:
                yield "objective.preset", name
    for key in re.findall(r"remove ([\w.]+)", sentence):
        yield key, None
    if "use a log with log-probs" in sentence:
        yield "data", "all"


def changed(settings: Settings, key: str, value: Json) -> Settings:
    """Return the settings with one of them changed."""
    made: Settings = json.loads(json.dumps(settings))
    *tables, name = key.split(".")
    place = made
    for table in tables:
        place = place.setdefault(table, {})
    place.pop(name, None)
    if value is not None:
        place[name] = value
    return made


def combinations(presets: Sequence[str], logs: Sequence[Data]) -> Iterator[tuple[str, str, Data, float, Settings]]:
    """Yield preset, mode, data, size of the model and settings. A run that replays or is offline starts from a log."""
    for preset, (mode, asked), data, rate, size in product(
        presets, MODES.items(), [NO_LOG, *logs], RATES, SIZES.values()
    ):
        if mode == "offline" and not data.uri:
            continue
        run = {**asked.get("run", {}), **({"experience": data.uri} if data.uri else {})}
        yield (
            preset,
            mode,
            data,
            size,
            {**asked, "run": run, "objective": {"preset": preset}, "optimizer": {"learning_rate": rate}},
        )


def follow(settings: Settings, data: Data, parameters: float, sentence: str) -> list[str]:
    """Return the changes of a sentence after which check refuses as before, or for another reason than it named before.

    A sentence without a change is returned itself.
    """
    circular, named, before = [], [*advice(sentence)], judge(settings, data, parameters)
    others = _reasons(before.refused) - _reasons([sentence])
    known = before.loses and before.loses != sentence
    for key, value in named:
        if key == "data":
            after = judge(settings, replace(data, contents=replace(data.contents, with_logprobs=GROUPS)), parameters)
        else:
            after = judge(changed(settings, key, value), data, parameters)
        if _reasons(after.refused) - others or (after.loses and not known):
            circular.append(f"{key} = {value}: {after.refused or after.loses}")
    return circular if named else [f"no advice: {sentence}"]


def _reasons(sentences: Iterable[str]) -> set[str]:
    """Return what each sentence says, without its advice."""
    return {sentence.partition("; ")[0] for sentence in sentences}
