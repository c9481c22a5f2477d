"""Refuse updates of real and simulated runs and count, beside the books, the updates that each group had a part in.

    python -m lab.torture.refused_updates           500 simulated and 50 real runs: rows hardening.3.*; a quarter of an
                                                    hour
    python -m lab.torture.refused_updates --short   20 simulated runs and 3 real ones, nothing recorded

A real run is `offbeat.run.local.train` with a tiny model and 2 to 8 updates per batch. A third of its groups are
refused at one of the updates. Every run is made twice: in one go, and with a crash from which it resumes. Both must
end with the same bits, and the ledger must hold the updates that were counted where they are made.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lab.figures import ROOT, Figure, command_parser, report
from lab.simulation.run import simulate
from offbeat.config import Config, parse
from offbeat.experience.ledger import Ledger
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory
from offbeat.run.learner import fixed_settings
from offbeat.run.local import train
from offbeat.seeds import derive
from offbeat.trainer.batch import Batch
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.trainer import Trainer
from offbeat.types import Json
from tests.fixtures.runs import Broken, scratch
from tests.fixtures.tiny_model import save_model

SIMULATED, REAL = 500, 50
STEPS, SAVE_EVERY = 8, 3


class Crash(Exception):
    """Ends a run in the middle of something."""


@dataclass
class Refusals:
    """Refuses a third of all groups, each at an update that depends on its id alone, and counts the updates made."""

    seed: int
    updates: int
    refused: Counter[int] = field(default_factory=Counter)
    """Refusals by the update that was refused, from 1."""
    made: dict[int, Counter[str]] = field(default_factory=dict)
    """By step, the updates that each group had a part in."""
    _batch: Batch | None = None
    _update: int = 0

    def refused_at(self, group_id: str) -> int | None:
        """Return the update at which a group is refused, from 0."""
        number = derive(self.seed, "refusal", group_id) % (3 * self.updates)
        return number if number < self.updates else None

    def rewind(self, step: int) -> None:
        """Forget the updates of steps that a resumed run makes again."""
        self.made = {one: counts for one, counts in self.made.items() if one <= step}

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Refuse and count inside this process."""
        forward_backward, take_step = Trainer._forward_backward, Trainer.train

        def refusing(trainer: Trainer, batch: Batch, parts: list[Any]) -> tuple[float, int, Tensor]:
            if batch is not self._batch:
                self._batch, self._update = batch, 0
            loss, tokens, faulty_B = forward_backward(trainer, batch, parts)
            trained = {group.id for group in batch.trimmed}
            at = [self.refused_at(group.id) == self._update and group.id in trained for group in batch.groups]
            if any(at):
                self.refused[self._update + 1] += 1
            self._update += 1
            return loss, tokens, faulty_B | torch.tensor(at)

        def counting(trainer: Trainer, *args: Any) -> Any:
            update, optimizer = trainer.optimizer.update, trainer.optimizer

            def counted(step: int, norm: float | None = None) -> float:
                assert self._batch is not None
                self.made.setdefault(step + 1, Counter()).update(group.id for group in self._batch.trimmed)
                return update(step, norm)

            with patch.object(optimizer, "update", counted):
                return take_step(trainer, *args)

        with patch.object(Trainer, "_forward_backward", refusing), patch.object(Trainer, "train", counting):
            yield


def real_run(seed: int, model: Path, place: Path) -> Refusals:
    """Make one run in one go and one with a crash; compare their books with the count and their last policies."""
    rng = random.Random(seed)
    config = _config(model, seed, updates=2 + seed % 7)
    last_event = rng.randint(3, 3 * STEPS)
    policies, counted = [], Refusals(seed, config.updates_per_batch)
    for name, crash in (("whole", 0), ("crashed", last_event)):
        counted = Refusals(seed, config.updates_per_batch)
        directory = RunDirectory(place / f"{seed}-{name}")
        directory.create(config)
        with counted.injected():
            try:
                train(config, directory, watching=_crash_after(crash))
            except Crash:
                newest = _newest(config, directory)
                counted.rewind(0 if newest is None else newest[0])
                train(config, directory)
        _compare(LogReader.open(directory.experience).ledger(), counted)
        newest = _newest(config, directory)
        assert newest is not None
        policies.append(newest[1])
    if not all(torch.equal(tensor, policies[1][one]) for one, tensor in policies[0].items()):
        raise Broken(f"seed {seed}: the resumed run ends with another policy")
    return counted


def _config(model: Path, seed: int, updates: int) -> Config:
    return parse(
        {
            "steps": STEPS,
            "seed": seed,
            "prompts_per_step": 4,
            "group_size": 4,
            "updates_per_batch": updates,
            "model": {"path": str(model), "compute": "float32", "serve": "float32"},
            "engine": {"kind": "hf"},
            "sampling": {"max_tokens": 5},
            "optimizer": {"learning_rate": 1e-3},
            "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
            "trainer": {"save_every": SAVE_EVERY},
            "task": {"name": str(ROOT / "tests" / "run" / "digits_task.py"), "scorers": 1},
        }
    )


def _crash_after(events: int) -> Any:
    """Return a watcher that crashes the run at an event; 0 never does."""
    seen = 0

    def watch(event: Mapping[str, Json]) -> None:
        nonlocal seen
        seen += event["kind"] in ("step", "published", "refused")
        if seen == events:
            raise Crash

    return watch


def _newest(config: Config, directory: RunDirectory) -> tuple[int, dict[str, Tensor]] | None:
    with Checkpoints(directory.checkpoints, config=fixed_settings(config)) as checkpoints:
        newest = checkpoints.newest()
        return None if newest is None else (newest.step, dict(newest.policy()))


def _compare(ledger: Ledger, counted: Refusals) -> None:
    """Raise `Broken` unless the ledger holds what was counted."""
    made: Counter[str] = Counter()
    for counts in counted.made.values():
        made.update(counts)
    recorded = {one: sum(updates or 0 for updates in fate.updates) for one, fate in ledger.fates.items()}
    if {one: count for one, count in recorded.items() if count} != dict(made):
        raise Broken(f"seed {counted.seed}: recorded {recorded}, counted {dict(made)}")


def measure(simulated: int, real: int, first: int = 0) -> list[Figure]:
    """Run everything and return the rows."""
    total, failures = simulate(simulated, 10, len(os.sched_getaffinity(0)), refusing=True)
    broken, refused = [], Counter[int]()
    with scratch() as place:
        save_model(place / "model")
        for seed in range(first, first + real):
            try:
                refused += real_run(seed, place / "model", place).refused
            except Broken as error:
                broken.append(str(error))
            print(f"seed {seed}, {real} runs; broken: {len(broken)}", flush=True)
    by_update = ", ".join(f"{count} at update {update}" for update, count in sorted(refused.items()))
    return [
        Figure(
            "hardening.3.simulated", "simulated runs with 2 to 8 updates per batch and refused updates: books true",
            f"all of {simulated}", f"{simulated - len(failures)} of {simulated}", "runs",
            not failures, simulated,
            f"{total['refused']:,} refusals, {total['refused after an update']:,} of them after an update; "
            f"{total['driver died']:,} crashes; updates of each group counted where they are made",
        ),
        Figure(
            "hardening.3.real", "real runs with 2 to 8 updates per batch and refusals at every update: books true, and "
            "the same bits after a crash", f"all of {real}", f"{real - len(broken)} of {real}", "runs",
            not broken, real, f"refused: {by_update}" + "".join(f"; {one}" for one in broken[:3]),
        ),
    ]  # fmt: skip


def main() -> None:
    parser = command_parser(__doc__, short="20 simulated runs and 3 real ones, nothing recorded")
    parser.add_argument("--seed", type=int, default=0, help="of the first real run")
    chosen = parser.parse_args()
    counts = (20, 3) if chosen.short else (SIMULATED, REAL)
    sys.exit(not report(chosen.short, *measure(*counts, chosen.seed)))


if __name__ == "__main__":
    main()
