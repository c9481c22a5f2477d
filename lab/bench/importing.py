"""Figures of importing: `docs` (the examples of docs/experience.md run) and `import` (throughput).

python -m lab.bench.importing docs
python -m lab.bench.importing import            # about two minutes
python -m lab.bench.importing import --short    # seconds; nothing is recorded
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from lab.figures import ROOT, Figure, record
from lab.fixtures.groups import made
from offbeat.experience.importing.importer import import_into, layout_of, read_groups
from offbeat.experience.importing.records import Row, find_records
from offbeat.experience.importing.shapes import About
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import ValidationRules
from offbeat.types import Score, Unknown

FORMATS = ("jsonl", "parquet")


def docs() -> bool:
    """Must show 7."""
    tests = ["tests/site/test_docs.py", "tests/experience/test_cli_log.py"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *tests,
            "-k",
            "experience.md or commands_in_the_docs or docs_name_every",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    passed, failed = (re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "failed"))
    if done.returncode:
        print(done.stdout)
    page = (ROOT / "docs" / "experience.md").read_text(encoding="utf-8")
    blocks, commands = page.count("```python\n"), len(re.findall(r"^offbeat ", page, re.MULTILINE))
    good, bad = int(passed[1]) if passed else 0, int(failed[1]) if failed else 0
    return record(
        Figure(
            "experience.7",
            "tests of docs/experience.md that pass: schema and figures current, Python blocks and commands run",
            "all",
            f"{good} of {good + bad}",
            "tests",
            done.returncode == 0 and good > 0,
            blocks + commands,
            f"{blocks} Python blocks and {commands} commands, run in the order of the page; the door's reasons are "
            "compared with the code, and the dry run's output with what the page shows",
        )
    )


def rows(count: int, start: int) -> Iterator[Row]:
    """Somebody's rollouts: 8 completions of 1,024 tokens with log-probs and rewards."""
    for number in range(start, start + count):
        group = made(number, size=8, tokens=1024)
        logprobs = [c.behavior_logprobs for c in group.completions]
        yield {
            "prompt": group.prompt.token_ids.tolist(),
            "responses": [c.token_ids.tolist() for c in group.completions],
            "rewards": [c.score.reward for c in group.completions if isinstance(c.score, Score)],
            "logprobs": [[round(x, 5) for x in p.tolist()] for p in logprobs if not isinstance(p, Unknown)],
        }


def written(place: Path, count: int, start: int) -> dict[str, Path]:
    """The same rollouts in each format."""
    given = list(rows(count, start))
    files = {name: place / f"rollouts.{name}" for name in FORMATS}
    files["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in given))
    pa.parquet.write_table(pa.Table.from_pylist(given), files["parquet"], row_group_size=64)
    return files


def seconds(file: Path, into: Path, count: int) -> float:
    """How long the import of a file into a new log takes, until all of it is on disk."""
    began = time.perf_counter()
    records = find_records(str(file))
    with ExperienceLog.open(into) as log:
        found = read_groups(records, layout_of(records), About(task="arithmetic", source="model:other"))
        tally = import_into(log, found, rules=ValidationRules())
    assert tally.taken == count, tally
    return time.perf_counter() - began


def throughput(rounds: int, count: int) -> list[Figure]:
    """Alternating between formats; files are written before the clock starts."""
    taken: dict[str, list[float]] = {name: [] for name in FORMATS}
    sizes: dict[str, int] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as place:
            for name, file in written(Path(place), count, turn * count).items():
                taken[name].append(seconds(file, Path(place) / f"log-{name}", count))
                sizes[name] = file.stat().st_size
    figures = []
    for name in FORMATS:
        rate = count / statistics.median(taken[name])
        spread = ", ".join(f"{count / value:.0f}" for value in taken[name])
        note = (
            f"median of {rounds} rounds ({spread}) that alternate with the other format; {count} groups of 8 × 1,024 "
            f"tokens with log-probs, {sizes[name] / 1e6:.0f} MB; one process, local disk, fsync included; "
            f"{rate * 8 * 1024 / 1e6:.2f} M tokens/s"
        )
        what = f"import of {name} into a new log"
        figures.append(
            Figure(f"experience.7.import-{name}", what, "stated", round(rate), "groups/s", True, rounds, note)
        )
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["docs", "import"])
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes; records nothing")
    chosen = parser.parse_args()
    if chosen.what == "docs":
        sys.exit(0 if docs() else 1)
    measured = throughput(1, 64) if chosen.short else throughput(5, 500)
    if not chosen.short:
        sys.exit(0 if record(*measured) else 1)
    for figure in measured:
        print(f"{figure.id}  {figure.what}: {figure.measured} {figure.unit}, short form, not recorded")
