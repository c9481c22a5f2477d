"""Fill the built parts of the docs: tables that come from the code or from lab/results, so that they stay current.

    python scripts/build_docs.py            write them
    python scripts/build_docs.py --check    fail if a file differs from what would be written

A built part is the text between `<!-- built: NAME -->` and `<!-- end -->`. NAME is one of `BUILDERS` here or in a file
of lab/site (`reference.py`, `coming_from.py`, `evidence_page.py`), `results SLUG` for the table of
lab/results/SLUG.json, or `age SLUG` for the line of its page that says that its rows are old.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lab.site import coming_from, evidence_page, reference  # noqa: E402  # found by the line above
from lab.site.age import age  # noqa: E402
from lab.site.lines import items  # noqa: E402
from lab.site.peers import steps_table  # noqa: E402
from lab.site.reference import table  # noqa: E402

RESULTS = ROOT / "lab" / "results"
BLOCK = re.compile(r"(<!-- built: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def results(slug: str) -> str:
    """Every figure of one results file, those that miss their goal included; each row has its id as an anchor."""
    return items([f'<a id="{row["id"]}"></a> **{row["id"]}**: {_told(row)}' for row in _rows(RESULTS / f"{slug}.json")])


def shortfalls() -> str:
    """Every figure of every area that misses its goal."""
    missed = [
        f"[{row['id']}]({file.stem}.md#{row['id']}): {row['what']}: {_measured(row)}, goal {row['goal']}. {row['note']}"
        for file in sorted(RESULTS.glob("*.json"))
        for row in _rows(file)
        if not row["holds"]
    ]
    return items(missed)


def _told(row: dict[str, Any]) -> str:
    missed = "" if row["holds"] else ", **misses its goal**"
    verdict = f"{row['what']}: **{_measured(row)}**, goal {row['goal']}{missed}, n = {row['n']}."
    note = f"{row['note']}." if row["note"] else ""
    return f"{verdict} {note} `{row['command']}`{_gone(row['command'])} at {row['commit']}, {row['date']}"


def _gone(command: str) -> str:
    """Mark a command that the lab no longer has: its rows are history."""
    module = command.split()[2]
    return "" if (ROOT / f"{module.replace('.', '/')}.py").exists() else " (deleted since)"


def areas() -> str:
    """Every results file, with how many of its figures hold."""
    cells = []
    for file in sorted(RESULTS.glob("*.json")):
        page = (ROOT / "docs" / "measured" / f"{file.stem}.md").read_text(encoding="utf-8")
        rows = _rows(file)
        title = page.partition("\n")[0].removeprefix("# ")
        held = sum(row["holds"] for row in rows)
        cells.append([f"[{title}]({file.stem}.md)", f"{held} of {len(rows)}", f"`lab/results/{file.name}`"])
    return table(["page", "figures that reach their goal", "file"], cells)


def _rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _measured(row: dict[str, Any]) -> str:
    return f"{row['measured']} {row['unit']}".strip()


def suite() -> str:
    """The parts of the standing suite, as its last full run has kept them."""
    parts = json.loads((ROOT / "lab" / "torture" / "suite.json").read_text(encoding="utf-8"))
    failed = ["<br>".join(f"`{shown}`" for shown in one["failed"]) or "none" for one in parts]
    lines = [
        [one["part"], str(one["tries"]), str(one["seconds"]), shown] for one, shown in zip(parts, failed, strict=True)
    ]
    return table(["fault or attack", "tries", "median seconds", "failed"], lines)


def transcript() -> str:
    """The quickstart in a new environment, as `lab/site/user_path.py` recorded it."""
    file = ROOT / "docs" / "quickstart-transcript.txt"
    if not file.exists():
        return "`python -m lab.site.user_path` records the output; it has not been run here.\n"
    kept = re.sub(r"(?:^step \d+/\d+ .*\n)+", "…\n", file.read_text(encoding="utf-8").strip(), flags=re.M)
    return f"The [full transcript]({file.name}) has every step.\n\n```text\n{kept}\n```\n"


BUILDERS: dict[str, Callable[[], str]] = {
    **reference.BUILDERS,
    **coming_from.BUILDERS,
    **evidence_page.BUILDERS,
    "areas": areas,
    "shortfalls": shortfalls,
    "steps": steps_table,
    "suite": suite,
    "transcript": transcript,
}


OF_RESULTS: dict[str, Callable[[str], str | None]] = {"results": results, "age": age}
"""Builders that take the name of a results file. What cannot be built here stays as it is."""


def fill(text: str) -> str:
    """Return `text` with every built part built again."""

    def build(match: re.Match[str]) -> str:
        name, _, slug = match[2].partition(" ")
        built = OF_RESULTS[name](slug) if slug else BUILDERS[name]()
        return match[0] if built is None else match[1] + "\n" + built + "\n" + match[3]

    return BLOCK.sub(build, text)


def main(check: bool) -> int:
    """Fill all docs, or name those that are stale."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(filled, encoding="utf-8")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python scripts/build_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
