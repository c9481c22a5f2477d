"""Run directories with real files, made in milliseconds without training."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.config import Config, parse
from offbeat.events import EventKind
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import FileJournal
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan
from tests.fixtures.tiny_model import CHARACTERS, save_tokenizer

SIZE = 4


def tokens(text: str) -> list[int]:
    """Encode with the tiny tokenizer."""
    return [CHARACTERS.index(c) + 3 for c in text]


def group(
    number: int,
    version: int,
    right: int,
    answers: Sequence[str] = ("42", "41", "7", "abc"),
    *,
    mark: str = "",
    prompt: int | None = None,
) -> Group:
    """Make a group whose first `right` completions have reward 1."""
    name = f"g{mark}-{number}"
    return Group(
        name,
        Prompt(f"p-{number if prompt is None else prompt}", tokens("17+25="), "arithmetic", {"answer": "42"}),
        tuple(
            Completion(
                f"{name}/{i}",
                tokens(text),
                [-1.0] * len(text),
                (VersionSpan(version, 0, len(text)),),
                score=Score(float(i < right)),
            )
            for i, text in enumerate(answers)
        ),
    )


def make_run(
    place: Path,
    *,
    steps: int = 8,
    every: int = 2,
    seed: int = 0,
    evaluations: bool = True,
    ended: str | None = "",
    also: Callable[[FileJournal], None] = lambda journal: None,
    prompts: int = 10_000,
    **changes: object,
) -> RunDirectory:
    """Make a lockstep run with rising rewards and two groups a step; later, the second group has no contrast.

    After `prompts` groups the prompts repeat.
    """
    given: dict[str, object] = {"steps": steps, "seed": seed, "prompts_per_step": 2, "group_size": SIZE}
    config = parse(given | {"sync": {"every": every}, "model": {"path": "tiny"}} | changes)
    directory = RunDirectory(place)
    directory.create(config)
    save_tokenizer(directory.tokenizer)
    clock = iter(float(second) for second in range(10_000))
    with FileJournal(directory.events, clock=lambda: next(clock)) as journal:
        journal.write(EventKind.ESTIMATED, 0, memory="little")
        journal.write(EventKind.PUBLISHED, 0, version=0, why="first", how="anchor", bytes=1000)
        for step in range(1, steps + 1):
            _write_step(journal, step, config)
            if step % every == 0:
                journal.write(EventKind.PUBLISHED, step, version=step, why="period", how="patch", bytes=100)
            if evaluations and step % every == 0:
                rate = step / steps
                journal.write(
                    EventKind.EVALUATED, step, prompts=64, **{"pass@1": [rate, max(0, rate - 0.1), min(1, rate + 0.1)]}
                )
        also(journal)
        if ended is not None:
            journal.write(EventKind.ENDED, steps, why=ended, ledger="balanced", seconds=_seconds(steps))
    mark = f" {directory.name}" if config.run.experience else ""  # as in run/build.py
    with ExperienceLog.open(config.run.experience or directory.experience) as log:
        _append(log, steps, every, mark, prompts)
    return directory


def _write_step(journal: FileJournal, step: int, config: Config) -> None:
    lag = (step - 1) % config.sync.every
    metrics = {
        "reward_mean": step / config.steps,
        "drift_tv_token": 0.01 * lag,
        "ess": 1 - 0.1 * lag,
        "predicted_gain": 0.1 * lag,
        "loss": math.nan,
    }
    by_lag = {str(lag): {"ess": 1 - 0.1 * lag, "drift_tv_token": 0.01 * lag, "gate_stopped_up": 0.25}}
    version = str(step - 1 - lag)
    journal.write(
        EventKind.STEP, step, metrics=metrics, by_lag=by_lag, lags=[lag] * 2, groups=2, replayed=0,
        rewards={version: [0.5, 2]}, seconds=_seconds(step),
    )  # fmt: skip


def _seconds(step: int) -> dict[str, float]:
    return {"waiting for groups": 3.0 * step, "training": 1.0 * step}


def _append(log: ExperienceLog, steps: int, every: int, mark: str, prompts: int) -> None:
    def made(number: int, version: int, right: int) -> Group:
        return group(number, version, right, mark=mark, prompt=number % prompts)

    for step in range(1, steps + 1):
        version = step - 1 - (step - 1) % every
        right = min(SIZE, 1 + 3 * version // max(1, steps - 1))
        log.append([made(2 * step, version, right), made(2 * step + 1, version, SIZE if step > steps // 2 else 2)])
        second = LedgerEventKind.ZERO_VARIANCE if step > steps // 2 else LedgerEventKind.TRAINED
        for number, kind in ((2 * step, LedgerEventKind.TRAINED), (2 * step + 1, second)):
            log.record([LedgerEvent(f"g{mark}-{number}", kind, step=step, by=f"trainer{mark}")])
