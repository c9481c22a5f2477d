"""Write what block a says about each objective into the package, for `offbeat objectives` and `offbeat check`.

python -m lab.learning.evidence.limits    seconds; src/offbeat/objective/measured_lag.json, from finished blocks
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal

from lab.figures import command_parser
from lab.learning.evidence.block_claims import lag_verdicts
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import UNDECIDED, Cells, Verdict
from lab.learning.verdicts import finished
from offbeat.objective import measured
from offbeat.objective.measured import MeasuredLag
from offbeat.objective.presets import PRESETS

WRITTEN: Final = Path(measured.__file__).with_name("measured_lag.json")


def measured_in(cells: Cells) -> list[MeasuredLag]:
    """Return the verdicts of a block about the objectives that are presets."""
    verdicts = lag_verdicts(cells)
    return [
        _measured(cells, preset, v, verdicts[arms])
        for preset in PRESETS
        for v in LAGS[1:]
        if (arms := (f"{preset} v{v}", f"{preset} v1")) in verdicts
    ]


def _measured(cells: Cells, preset: str, v: int, verdict: Verdict) -> MeasuredLag:
    arm = f"{preset} v{v}"
    runs, drift = cells.of(arm), cells.drift(arm)
    word: Literal["tolerates", "fails", "undecided"] = (
        "undecided" if verdict.word == UNDECIDED else "tolerates" if verdict.holds else "fails"
    )
    mean, low, high = (round(getattr(verdict.interval, part), 4) for part in ("mean", "low", "high"))
    kept = None if drift is None else round(drift, 4)
    return MeasuredLag(preset, cells.block.task, v, word, mean, low, high, runs[0]["rate"], kept, len(runs))


def text() -> str:
    """Return the file as the cells of the finished blocks make it."""
    cells = [found for name in ("a-sums", "a-sorting") if (found := finished(BLOCKS[name])) is not None]
    lines = ",\n".join(json.dumps(asdict(one)) for block in cells for one in measured_in(block))
    return f"[\n{lines}\n]\n"


def main() -> None:
    command_parser(__doc__).parse_args()
    written = text()
    WRITTEN.write_text(written, encoding="utf-8")
    print(f"{len(json.loads(written))} verdicts in {WRITTEN.name}")


if __name__ == "__main__":
    main()
