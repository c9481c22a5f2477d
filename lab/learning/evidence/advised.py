"""Judge configurations as `offbeat check` does, and hold every sentence against the row that it names.

    python -m lab.learning.evidence.advised    seconds; rows transfer.5 and transfer.5.losses

A sentence is right if the row exists, the sentence has its numbers, and "known to lose" is said only where the row says
so. And every verdict that an objective fails must be met: a run with just its settings has to hear of it.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Final

from lab.figures import ROOT, Figure, command_parser, record
from offbeat.config import parse
from offbeat.config.known import Doubt, LagEvidence
from offbeat.objective.measured import MeasuredLag, measured_lags
from offbeat.types import Json

LAGS: Final[tuple[dict[str, Json], ...]] = (
    {"sync": {"every": 1}},
    {"sync": {"every": 5}},
    {"sync": {"every": 10}},
    {"sync": {"every": 40}},
    {"sync": {"offset": 9}},
    {"run": {"mode": "concurrent", "max_lag": 9}},
    {"sampler": {"mode": "replay"}},
)
OBJECTIVES: Final[tuple[dict[str, Json], ...]] = (
    {"preset": "rec-oneside-nois"},
    {"preset": "grpo-off-policy"},
    {"preset": "grpo"},
    {"preset": "red-drop"},
    {"preset": "asymre"},
    {"preset": "topr"},
    {"clip": [0.6, 2.0]},
)
SETTINGS: Final = ((1e-6, 135e6), (5e-6, 135e6), (5e-4, 9e4), (1e-4, 7e9), (2e-5, 1.5e9))
"""Learning rates, with the size of a model."""
LOSING: Final = ("fails", "loses", "a lower end")
"""How the row of a verdict begins that an objective loses."""


def measured_rows() -> dict[str, str]:
    """Return what every row of figures says, by its id."""
    files = (ROOT / "lab" / "results").glob("*.json")
    return {row["id"]: str(row["measured"]) for file in files for row in json.loads(file.read_text("utf-8"))}


def judge(rows: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield what is said of each configuration, and whether the row bears it out."""
    for lag, objective, (rate, parameters) in product(LAGS, OBJECTIVES, SETTINGS):
        config = parse({**lag, "objective": objective, "optimizer": {"learning_rate": rate}})
        finding = LagEvidence(config, parameters).finding()
        if finding is None:
            yield "", True
        else:
            found = rows.get(finding.row, "")
            numbers = found.partition(": ")[2]
            losing = finding.level is not Doubt.LOSES or found.startswith(LOSING)
            yield finding.text, bool(numbers) and finding.row in finding.text and numbers in finding.text and losing


def heard(row: MeasuredLag) -> bool:
    """True if a run with the settings of a verdict that fails is told that it is known to lose."""
    lag: dict[str, Json] = {"sampler": {"mode": "replay"}} if row.replay else {"sync": {"every": row.v}}
    objective: dict[str, Json] = {"preset": row.preset, **row.changes}
    config = parse({**lag, "objective": objective, "optimizer": {"learning_rate": row.rate}})
    finding = LagEvidence(config, row.parameters).finding()
    return finding is not None and finding.level is Doubt.LOSES and finding.row == row.row


def main() -> bool:
    command_parser(__doc__).parse_args()
    judged = list(judge(measured_rows()))
    said = [right for text, right in judged if text]
    for text in [text for text, right in judged if not right]:
        print(f"not borne out: {text}")
    failing = [row for rows in measured_lags().values() for row in rows if row.verdict == "fails"]
    unheard = [row.row for row in failing if not heard(row)]
    return record(
        Figure(
            "transfer.5", "configurations judged by `offbeat check` whose sentence about lag has its row and numbers",
            "all of at least 200", f"{sum(right for _, right in judged)} of {len(judged)}", "configurations",
            all(right for _, right in judged) and len(judged) >= 200, len(judged),
            f"{len(said)} with a sentence, {len(judged) - len(said)} without",
        ),
        Figure(
            "transfer.5.losses", "verdicts that an objective fails of which a run with these settings is told",
            f"{len(failing)} of {len(failing)}", f"{len(failing) - len(unheard)} of {len(failing)}", "verdicts",
            not unheard, len(failing), f"not told: {', '.join(unheard)}" if unheard else "",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(not main())
