"""Check that replay draws what it promises, and that groups are retired by their measured drift.

    python -m lab.bench.reuse            minutes; writes rows promises.1.*
    python -m lab.bench.reuse --short    fewer steps; records nothing

The runs are real: a tiny model, the transformers engine, and the settings that a user would keep.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.figures import Figure, command_parser, report
from lab.learning import model
from lab.learning.cells import Cell, fixed, hand_over
from lab.learning.rows import LEARNING
from offbeat.config import Config, examine, parse
from offbeat.config.parsing import load
from offbeat.experience.index import Columns
from offbeat.experience.modes import Replay
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits, Waiting
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.types import GroupDrift

DRAWS = 1920
BUDGET = 9


def draws(config: Config, place: Path) -> list[Draw]:
    """Train a run and return the batches that its sampler drew."""
    found: list[Draw] = []

    def watch(loop: Loop) -> None:
        choose = loop.sampler.draw

        def draw(k: int, *, at_least: int | None = None) -> Draw | Waiting:
            outcome = choose(k, at_least=at_least)
            if isinstance(outcome, Draw):
                found.append(outcome)
            return outcome

        loop.sampler.draw = draw  # type: ignore[method-assign]

    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory, started=watch)
    return found


def tiny(place: Path) -> dict[str, Mapping[str, Any]]:
    """Return the settings that put a run on a tiny model; everything else stays as shipped."""
    return {
        "model": {"path": str(place), "compute": "float32", "serve": "float32"},
        "task": {"name": str(LEARNING / "task.py"), "scorers": 1},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 4},
        "optimizer": {"learning_rate": 2.5e-4},
        "trainer": {"token_budget": 2048},
    }


def replay_by_default(steps: int) -> Figure:
    """Row promises.1.share."""
    with tempfile.TemporaryDirectory() as scratch:
        config = parse({"steps": steps, "sampler": {"mode": "replay"}, **tiny(model.directory())})
        batches = draws(config, Path(scratch, "run"))
    replayed, total = sum(sum(one.replayed) for one in batches), sum(len(one.ordinals) for one in batches)
    lags = [
        lag for one in batches for lag, past in zip(one.lags, one.replayed, strict=True) if past and lag is not None
    ]
    retired = Counter(one.cause for batch in batches for one in batch.retired)
    return Figure(
        "promises.1.share",
        "share of draws that are replays, sampler.mode = 'replay' and every other sampler and sync setting as shipped",
        "0.45 to 0.55",
        round(replayed / total, 4),
        "",
        0.45 <= replayed / total <= 0.55,
        total,
        f"plan: {config.plan}. Replayed groups are {min(lags)} to {max(lags)} steps old; retired: {dict(retired)}",
    )


def own_groups(steps: int) -> Figure:
    """Row promises.1.recipe."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        donor = Cell(fixed(10), 2.5e-4, seed=900, steps=10)
        draws(donor.config(donor.arm.sections), place / "donor")
        hand_over(RunDirectory(place / "donor"), place / "experience")
        changes = [
            f"{table}.{key}={value!r}".replace("'", '"')
            for table, settings in tiny(model.directory()).items()
            for key, value in settings.items()
        ]
        with as_file(files("offbeat").joinpath("recipes/offline-then-online.toml")) as recipe:
            config = load(recipe, [*changes, f"steps={steps}", f'run.experience="{place / "experience"}"'])
        batches = draws(config, place / "run")
    replays = [lag for one in batches for lag, past in zip(one.lags, one.replayed, strict=True) if past]
    own = sum(lag is not None for lag in replays)
    total = sum(len(one.ordinals) for one in batches)
    return Figure(
        "promises.1.recipe",
        "recipe offline-then-online: draws that replay the run's own groups",
        "above 0",
        own,
        "draws",
        own > 0,
        total,
        f"{len(replays)} of {total} draws come from the past, {len(replays) - own} of them imported answers",
    )


IMPOSSIBLE: Mapping[str, dict[str, Any]] = {
    "retired before its cooldown ends": {"objective": {"preset": "grpo"}, "sampler": {"cooldown": 30}},
    "a preset for fresh data only": {"objective": {"preset": "reinforce"}},
    "the run ends before the first replay": {"steps": 3, "sampler": {"cooldown": 5}},
    "no room for fresh groups": {"sampler": {"share": 1.0}},
    "nine tenths from groups used twice": {"sampler": {"share": 0.9, "reuse_budget": 2}},
}


def refusals() -> Figure:
    """Row promises.1.refused."""
    reasons = {}
    for name, settings in IMPOSSIBLE.items():
        asked = {**settings, "sampler": {"mode": "replay", **settings.get("sampler", {})}}
        reasons[name] = examine(asked).problems
    refused = sum("sampler.share" in " ".join(problems) for problems in reasons.values())
    return Figure(
        "promises.1.refused",
        "samplers that can never draw what they promise and are refused with the reason",
        "all",
        f"{refused} of {len(IMPOSSIBLE)}",
        "configurations",
        refused == len(IMPOSSIBLE),
        len(IMPOSSIBLE),
        "; ".join(f"{name}: {problems[0].split(';')[0]}" for name, problems in reasons.items() if problems),
    )


def retirement(steps: int, batch: int = 16, limit: float = 0.2, floor: float = 0.5) -> Figure:
    """Row promises.1.retired: groups whose drift grows at a known rate."""
    sampler = Sampler(
        Replay(reuse_budget=BUDGET), SamplerLimits(batch, max_lag=0, retire_drift=limit, retire_ess=floor), seed=1
    )
    rng = np.random.default_rng(1)
    growth, decay = rng.exponential(0.02, steps * batch), rng.exponential(0.02, steps * batch)
    too_late = too_early = retired = fed = 0
    due, gone, uses = set[int](), set[int](), Counter[int]()
    for k in range(steps):
        missing = batch - batch // 2 if k else batch
        columns: list[Any] = [[value] * missing for value in (k, 0, 1, True, 8, 8, 0.5, 0.5, 9)]
        sampler.feed(Columns(np.arange(fed, fed + missing), *columns))
        fed += missing
        draw = sampler.draw(k, at_least=1)
        assert isinstance(draw, Draw)
        found = {one.ordinal for one in draw.retired}
        too_late += len(due - found) + len(gone & set(draw.ordinals))
        too_early += len(found - due)
        retired += len(found)
        gone |= found
        ages = {one: lag or 0 for one, lag in zip(draw.ordinals, draw.lags, strict=True)}
        known = {one: GroupDrift(growth[one] * age, float(np.exp(-decay[one] * age))) for one, age in ages.items()}
        uses.update(draw.ordinals)
        sampler.measured(known)
        due = {
            one
            for one, drift in known.items()
            if uses[one] < BUDGET and (drift.tv > limit or drift.ess < floor)  # beyond its budget it is closed anyway
        }
    return Figure(
        "promises.1.retired",
        "made-up groups with known drift: retired too late or too early",
        "0",
        too_late + too_early,
        "groups",
        too_late + too_early == 0 and retired > 0,
        fed,
        f"{steps} batches of {batch}; limits: drift {limit}, effective sample size {floor}; {retired} groups retired, "
        f"each at the draw after the measurement; {too_late} drawn again, {too_early} retired within the limits",
    )


def main(short: bool) -> bool:
    torch.set_num_threads(1)
    steps = 12 if short else DRAWS // 32
    rows = [refusals(), retirement(60 if short else 2000), replay_by_default(steps), own_groups(steps)]
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main(command_parser(__doc__, short="twelve steps each; record nothing").parse_args().short))
