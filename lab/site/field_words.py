"""Names of other tools and typos: does `offbeat check` name the setting that was meant?

`field_words.txt` has 100 of them, with the right settings written before the table of synonyms was. The second figure
misspells every setting by rule, so that nobody chose the words.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.figures import Figure, command_parser, record
from offbeat.config import examine
from offbeat.config.knobs import knobs
from tests.fixtures.processes import OFFBEAT

WORDS = Path(__file__).parent / "field_words.txt"


def sections() -> dict[str, dict[str, str]]:
    """Return what is typed and what is meant, by tool."""
    found: dict[str, dict[str, str]] = {}
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            tool = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            typed, _, meant = line.partition(" = ")
            tool[typed] = meant
    return found


def check_output(words: list[str]) -> str:
    """Return what `offbeat check` prints about a file with the words, and `--set` for those with dots."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "run.toml")
        file.write_text("".join(f"{word} = 1\n" for word in words if "." not in word))
        settings = [part for word in words if "." in word for part in ("--set", f"{word}=1")]
        done = subprocess.run([OFFBEAT, "check", str(file), *settings], capture_output=True, text=True)
    return " ".join((done.stdout + done.stderr).split())


def slips(name: str, chance: random.Random) -> Iterator[str]:
    """Yield the name with a letter dropped, a letter doubled, two letters swapped, and a letter replaced."""
    at = chance.randrange(1, len(name) - 1)
    yield name[:at] + name[at + 1 :]
    yield name[:at] + name[at] + name[at:]
    yield name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    yield name[:at] + chance.choice("aeinorst") + name[at + 1 :]


def misspelled() -> tuple[int, list[str]]:
    """Return how many slips were tried, and those that lead to another setting or to none."""
    chance, tried, wrong = random.Random(8), 0, []
    for key in knobs():
        table, _, name = key.rpartition(".")
        for typed in dict.fromkeys(slips(name, chance)):
            path = f"{table}.{typed}" if table else typed
            if path in knobs():
                continue
            tried += 1
            problems = examine({table: {typed: 1}} if table else {typed: 1}).problems
            if not any(f"{path} is not a setting; did you mean {key!r}" in problem for problem in problems):
                wrong.append(path)
    return tried, wrong


def main() -> int:
    """Count the right suggestions."""
    command_parser(__doc__).parse_args()
    wrong = {
        f"{typed} ({tool})": meant
        for tool, words in sections().items()
        for printed in [check_output(list(words))]
        for typed, meant in words.items()
        if f" {typed} is not a setting; did you mean {meant!r}" not in printed
    }
    total = sum(len(words) for words in sections().values())
    tried, missed = misspelled()
    print(json.dumps({"wrong": wrong, "misspelled and missed": missed}, indent=1, ensure_ascii=False))
    right, caught = total - len(wrong), tried - len(missed)
    held = record(
        Figure(
            "first-day.8",
            "names of TRL, verl, OpenRLHF and prime-rl, words of habit and typos for which `offbeat check` suggests "
            "the right setting",
            "≥ 95 of 100",
            right,
            f"of {total}",
            right >= 95,
            total,
            "The list was committed before the table of synonyms; both have the same author. "
            + (f"Wrong: {', '.join(wrong)}." if wrong else "None is wrong."),
        ),
        Figure(
            "first-day.8.slips",
            "settings misspelled by rule (a letter dropped, doubled, swapped or replaced) for which the right one is "
            "suggested",
            "≥ 95 %",
            round(100 * caught / tried, 1),
            "%",
            caught / tried >= 0.95,
            tried,
            f"Missed: {', '.join(missed)}." if missed else "",
        ),
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
