"""Check every combination of preset, mode, updates per batch and lag: beyond what is reported, `check` says so.

    python -m lab.parity.lag_limits    seconds; writes row promises.6.table and lab/parity/lag_limits.csv

The largest lag is computed here from first principles, step by step, and not with the code under test.
"""

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import Any

from lab.figures import ROOT, Figure, command_parser, record
from offbeat.config import examine
from offbeat.config.known import LagEvidence
from offbeat.objective.presets import PRESETS

TABLE = ROOT / "lab" / "parity" / "lag_limits.csv"
UPDATES = (1, 2, 4, 16)
LAGS = (0, 1, 3, 4, 8, 9, 19, 20, 21, 100)


def combinations() -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Yield preset, mode, i, the lag in steps that the settings ask for, and the settings."""
    modes: dict[str, Any] = {
        "lockstep": lambda lag: {"sync": {"every": lag + 1}},
        "offset": lambda lag: {"sync": {"every": 1, "offset": lag}},
        "drift": lambda lag: {"sync": {"every": lag + 1, "drift_budget": 0.05}},
        "cost": lambda lag: {"sync": {"every": lag + 1, "by_cost": True}},
        "concurrent": lambda lag: {"run": {"mode": "concurrent", "max_lag": lag}},
        "replay": lambda lag: {"sampler": {"mode": "replay", "share": 0.1, "retire_age": max(lag, 1)}},
        "offline": lambda lag: {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}},
    }
    for (preset, (mode, settings)), updates, lag in product(product(PRESETS, modes.items()), UPDATES, LAGS):
        yield preset, mode, updates, max(lag, 1) if mode == "replay" else lag, settings(lag)


def lag_in_updates(mode: str, steps: int, updates: int) -> float:
    """Return the lag of the last update on a group that waited for `steps` steps, by counting updates."""
    if mode == "offline":
        return inf
    made = 0
    for _ in range(steps):
        made += updates
    return made + updates - 1


def _write_table(rows: list[list[Any]]) -> None:
    """Write the largest lag against which nothing is said for each preset, mode and i."""
    accepted = {tuple(row[:3]): row for row in rows if row[6]}
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["preset", "mode", "i", "largest lag without a word, in steps", "in updates", "limit of the preset"]
        )
        table.writerows(row[:6] for row in accepted.values())


def main() -> bool:
    command_parser(__doc__).parse_args()
    rows, wrong, verdicts = [], [], Counter[str]()
    for preset, mode, updates, steps, settings in combinations():
        lag, limit = lag_in_updates(mode, steps, updates), PRESETS[preset].reported_lag
        asked = {"prompts_per_step": 32, "updates_per_batch": updates, "objective": {"preset": preset}, **settings}
        examined = examine(asked)
        finding = None if examined.problems else LagEvidence(examined.config).finding()
        verdicts["refused" if examined.problems else "nothing said" if finding is None else str(finding.level)] += 1
        rows.append([preset, mode, updates, steps, lag, limit, not examined.problems and finding is None])
        if not examined.problems and (finding is None) != (lag <= limit):
            wrong.append(rows[-1])
    _write_table(rows)
    return record(
        Figure(
            "promises.6.table",
            "combinations of preset, mode, i and lag that check judges wrongly at a learning rate of 1e-6: nothing "
            "said beyond the reported lag, or something within it",
            "0",
            len(wrong),
            "combinations",
            not wrong,
            len(rows),
            f"{', '.join(f'{level}: {count}' for level, count in verdicts.items())}; lab/parity/lag_limits.csv has the "
            "largest lag of each about which nothing is said",
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
