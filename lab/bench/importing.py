"""Measure the import of completions.

python -m lab.bench.importing docs              run the examples of the how-to pages: row experience.7; minutes
python -m lab.bench.importing import            groups a second: rows experience.7.import-*; about two minutes
python -m lab.bench.importing import --short    seconds; nothing is recorded
"""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from lab.figures import ROOT, Figure, command_parser, record, report
from lab.fixtures.pytest_runs import run_tests
from offbeat.experience.importing.importer import import_into, layout_of, read_groups
from offbeat.experience.importing.records import Row, find_records
from offbeat.experience.importing.shapes import ImportDefaults
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import ValidationRules
from offbeat.types import Score, Unknown
from tests.fixtures.groups import make_group

FORMATS = ("jsonl", "parquet")


def docs() -> bool:
    """Row experience.7."""
    tests = ["tests/site/test_docs.py", "tests/experience/test_cli_log.py"]
    run = run_tests(*tests, "-k", "experience-log.md or import-completions or inspect-the-log or docs_list_every")
    if not run.ok:
        print(run.output)
    pages = ("how-to/import-completions.md", "how-to/inspect-the-log.md", "how-it-works/experience-log.md")
    page = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages)
    blocks, commands = page.count("```python\n"), len(re.findall(r"^offbeat ", page, re.MULTILINE))
    return record(
        Figure(
            "experience.7",
            "tests of the docs of the experience log that pass: schema current, Python blocks and commands run",
            "all",
            f"{run.passed} of {run.passed + run.failed}",
            "tests",
            run.ok and run.passed > 0,
            blocks + commands,
            f"{blocks} Python blocks and {commands} commands, run in the order of the page; the reasons of refusals "
            "are compared with the code, and the output of the dry run with what the page shows",
        )
    )


def rows(count: int, start: int) -> Iterator[Row]:
    """Yield rollouts of another system: 8 completions of 1,024 tokens with log-probs and rewards."""
    for number in range(start, start + count):
        group = make_group(number, size=8, tokens=1024)
        logprobs = [c.behavior_logprobs for c in group.completions]
        yield {
            "prompt": group.prompt.token_ids.tolist(),
            "responses": [c.token_ids.tolist() for c in group.completions],
            "rewards": [c.score.reward for c in group.completions if isinstance(c.score, Score)],
            "logprobs": [[round(x, 5) for x in p.tolist()] for p in logprobs if not isinstance(p, Unknown)],
        }


def write_files(place: Path, count: int, start: int) -> dict[str, Path]:
    """Write the same rollouts in each format."""
    rollouts = list(rows(count, start))
    files = {name: place / f"rollouts.{name}" for name in FORMATS}
    files["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    pa.parquet.write_table(pa.Table.from_pylist(rollouts), files["parquet"], row_group_size=64)
    return files


def import_seconds(file: Path, into: Path, count: int) -> float:
    """Return the seconds of an import into a new log, until everything is on disk."""
    began = time.perf_counter()
    records = find_records(str(file))
    with ExperienceLog.open(into) as log:
        found = read_groups(records, layout_of(records), ImportDefaults(task="arithmetic", source="model:other"))
        tally = import_into(log, found, rules=ValidationRules())
    assert tally.taken == count, tally
    return time.perf_counter() - began


def throughput(rounds: int, count: int) -> list[Figure]:
    """Import in each format in turn. The files are written before the clock starts."""
    taken: dict[str, list[float]] = {name: [] for name in FORMATS}
    sizes: dict[str, int] = {}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as place:
            for name, file in write_files(Path(place), count, turn * count).items():
                taken[name].append(import_seconds(file, Path(place) / f"log-{name}", count))
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
    parser = command_parser(__doc__, short="import for seconds and record nothing")
    parser.add_argument("what", choices=["docs", "import"])
    chosen = parser.parse_args()
    if chosen.what == "docs":
        sys.exit(not docs())
    sys.exit(not report(chosen.short, *(throughput(1, 64) if chosen.short else throughput(5, 500))))
