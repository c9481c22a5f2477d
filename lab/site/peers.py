"""The list of a step of ours beside those of other trainers, from the rows of `python -m lab.bench.side_by_side`."""

import json
from typing import Any

from lab.figures import ROOT
from lab.site.lines import items

PARTS = ("step", "generation", "training")


def steps_table() -> str:
    """Return the seconds of a step and its parts in every arm, one list of all shapes."""
    file = ROOT / "lab" / "results" / "door.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in found}
    sets = [name.removeprefix("door.2.step-") for name in rows if name.startswith("door.2.step-")]
    lines = [line for one in sets for line in _lines(rows, one)]
    if not lines:
        return "`python -m lab.bench.side_by_side` measures it; it has not been run yet.\n"
    return items(lines)


def _lines(rows: dict[str, dict[str, Any]], one: str) -> list[str]:
    """Return a line for each arm of a set. A row names its arms, and has their medians in the same order."""
    arms = rows[f"door.2.step-{one}"]["what"].partition(": ")[2].split("; ")[:-1]
    medians = [str(rows[f"door.2.{part}-{one}"]["measured"]).split(" / ") for part in PARTS]
    tokens = " + ".join(one.split("-")[-2:])
    return [
        f"{tokens} tokens, {arm}: "
        + ", ".join(
            f"{part} [{values[i]}](../measured/door.md#door.2.{part}-{one}) s"
            for part, values in zip(PARTS, medians, strict=True)
        )
        for i, arm in enumerate(arms)
    ]
