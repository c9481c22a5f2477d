"""The table of a step of ours beside those of other trainers, from the rows of `python -m lab.bench.side_by_side`."""

import json
from typing import Any

from lab.figures import ROOT
from lab.site.reference import table

PARTS = ("step", "generation", "training")


def steps_table() -> str:
    """Return the seconds of a step and its parts in every arm, one table of all shapes."""
    file = ROOT / "lab" / "results" / "door.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows: dict[str, dict[str, Any]] = {row["id"]: row for row in found}
    sets = [name.removeprefix("door.2.step-") for name in rows if name.startswith("door.2.step-")]
    lines = [line for one in sets for line in _lines(rows, one)]
    if not lines:
        return "`python -m lab.bench.side_by_side` measures it; it has not been run yet.\n"
    return table(["tokens of prompt + completion", "a step of", *(f"{part}, s" for part in PARTS)], lines)


def _lines(rows: dict[str, dict[str, Any]], one: str) -> list[list[str]]:
    """Return a line for each arm of a set. A row names its arms, and has their medians in the same order."""
    arms = rows[f"door.2.step-{one}"]["what"].partition(": ")[2].split("; ")[:-1]
    medians = [str(rows[f"door.2.{part}-{one}"]["measured"]).split(" / ") for part in PARTS]
    links = [f"../measured/door.md#door.2.{part}-{one}" for part in PARTS]
    tokens = " + ".join(one.split("-")[-2:])
    return [
        [tokens, arm, *(f"[{values[i]}]({link})" for values, link in zip(medians, links, strict=True))]
        for i, arm in enumerate(arms)
    ]
