"""Write what our runs say about each objective under lag into the package, for `offbeat objectives` and `check`.

    python -m lab.learning.evidence.limits    seconds; src/offbeat/objective/measured_lag.json, from finished runs

Block a and the replay of block d are about tiny models, the runs of `smollm2.py` and `bands.py` about SmolLM2-135M.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, cast

from lab.figures import command_parser
from lab.learning.evidence import bands, smollm2
from lab.learning.evidence.block_claims import lag_verdicts, reuse_claims
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import UNDECIDED, Cells, Verdict, judge
from lab.learning.verdicts import finished
from offbeat.config import Config
from offbeat.objective import measured
from offbeat.objective.measured import MeasuredLag
from offbeat.types import Json

WRITTEN: Final = Path(measured.__file__).with_name("measured_lag.json")
DEFAULT: Final = Config().objective.preset
SMOLLM2: Final = "SmolLM2-135M"
PARAMETERS: Final = {"sums": 90_000, "sorting": 1_000_000, SMOLLM2: 135_000_000}
RATE: Final = 5e-6
"""Of the runs of SmolLM2-135M that have a verdict."""
OBJECTIVES: Final[Mapping[str, tuple[str, Mapping[str, Json]]]] = {
    "off-policy": ("grpo-off-policy", {}),
    "wide": (DEFAULT, {"clip": [0.6, 2.0]}),
}
"""Preset and settings of the arms of `bands.py`, by the first part of their name."""
REPLAY: Final = "replay retired by drift"
"""The arm of block d with the replay that is the default."""


def measured_in(cells: Cells) -> Iterator[MeasuredLag]:
    """Yield the verdicts of block a."""
    for (arm, base), verdict in lag_verdicts(cells).items():
        name, _, v = arm.rpartition(" v")
        if base == f"{name} v1" and int(v) in LAGS:
            yield _of_cells(cells, verdict, arm, int(v))


def replayed_in(cells: Cells) -> Iterator[MeasuredLag]:
    """Yield the verdict of block d on the final pass rate with replay."""
    for verdict in judge(list(reuse_claims(cells))):
        if verdict.claim.id.endswith("-final") and verdict.claim.paired.arms[0] == REPLAY:
            yield _of_cells(cells, verdict, REPLAY, 1, replay=True)


def _of_cells(cells: Cells, verdict: Verdict, arm: str, v: int, *, replay: bool = False) -> MeasuredLag:
    changes = dict(cast("dict[str, Json]", cells.block.arm(arm).settings.get("objective", {})))
    preset = str(changes.pop("preset", DEFAULT))
    return _measured(
        verdict, preset, cells.block.task, v, changes, cells.of(arm)[0]["rate"], cells.drift(arm), replay=replay
    )


def of_smollm2() -> Iterator[MeasuredLag]:
    """Yield the verdicts on SmolLM2-135M: the default objective, with replay too, and others of whole arms."""
    done = smollm2.rows()
    for verdict in smollm2.losses(done):
        arm = verdict.claim.paired.arms[0]
        drift = _drift([row for (name, _), row in done.items() if name == arm])
        v = 1 if arm == "replay" else int(arm.removeprefix("v"))
        yield _measured(verdict, DEFAULT, SMOLLM2, v, {}, RATE, drift, replay=arm == "replay")
    complete = bands.complete_arms(smollm2.rows(bands.FILE))
    for verdict in bands.verdicts(complete):
        arm = verdict.claim.paired.arms[0]
        name, _, v_ = arm.rpartition("-v")
        if verdict.claim.id == f"door.3.{arm}-end" and name in OBJECTIVES:
            preset, changes = OBJECTIVES[name]
            yield _measured(verdict, preset, SMOLLM2, int(v_), changes, RATE, _drift(complete[arm]))


def _drift(rows: Sequence[smollm2.SmolRow]) -> float | None:
    drifts = [row["drift"] for row in rows if "drift" in row]
    return fmean(drifts) if drifts else None


def _measured(
    verdict: Verdict, preset: str, task: str, v: int, changes: Mapping[str, Json], rate: float, drift: float | None,
    *, replay: bool = False,
) -> MeasuredLag:  # fmt: skip
    word: Literal["tolerates", "fails", "undecided"] = (
        "undecided" if verdict.word == UNDECIDED else "tolerates" if verdict.holds else "fails"
    )
    mean, low, high = (round(getattr(verdict.interval, part), 6) for part in ("mean", "low", "high"))
    kept = None if drift is None else round(drift, 4)
    n = len(verdict.claim.values)
    return MeasuredLag(
        preset, task, v, word, mean, low, high, rate, kept, n, verdict.claim.id, PARAMETERS[task], changes, replay
    )


def text() -> str:
    """Return the file as the finished runs make it."""
    blocks = {
        name: found for name in ("a-sums", "a-sorting", "d-sums") if (found := finished(BLOCKS[name])) is not None
    }
    verdicts = [one for name, cells in blocks.items() if name.startswith("a-") for one in measured_in(cells)]
    verdicts += [one for name, cells in blocks.items() if name.startswith("d-") for one in replayed_in(cells)]
    lines = ",\n".join(json.dumps(asdict(one)) for one in [*verdicts, *of_smollm2()])
    return f"[\n{lines}\n]\n"


def main() -> None:
    command_parser(__doc__).parse_args()
    written = text()
    WRITTEN.write_text(written, encoding="utf-8")
    print(f"{len(json.loads(written))} verdicts in {WRITTEN.name}")


if __name__ == "__main__":
    main()
