"""Import answers with own ids and join scores to them, 100,000 rows each, through the command line.

python -m lab.bench.feedback           rows first-day.4.*; about five minutes
python -m lab.bench.feedback --short   1,000 rows; seconds; nothing is recorded

Both files have repeated rows, contradictions and lines that are not JSON; the scores also have unknown ids and scores
that are no numbers. A plain loop over the rows says what has to come out of each command.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lab.figures import Figure, command_parser, machine, report

GROUP = 4
OFFBEAT = (sys.executable, "-c", "from offbeat.cli.main import main; main()")
Refused = Counter[tuple[str, str]]
"""Refusals by position and reason."""


@dataclass(frozen=True)
class Done:
    """What a command printed, which lines it refused, and how long it took."""

    output: str
    refused: Refused
    seconds: float

    def has(self, *lines: str) -> bool:
        return all(line in self.output.splitlines() for line in lines)


def run(place: Path, *arguments: str, stdin: Path | None = None) -> Done:
    """Run `offbeat` with `--refused`."""
    (place / "refused.jsonl").unlink(missing_ok=True)
    began = time.perf_counter()
    command = [*OFFBEAT, *arguments, "--refused", "refused.jsonl"]
    with (stdin or Path("/dev/null")).open("rb") as given:
        done = subprocess.run(command, cwd=place, stdin=given, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    entries = [json.loads(line) for line in (place / "refused.jsonl").read_text(encoding="utf-8").splitlines()]
    return Done(done.stdout, Counter((entry["where"], entry["reason"]) for entry in entries), seconds)


def write(path: Path, lines: list[str], seed: int) -> list[str]:
    """Write the lines in a random order, and return them in that order."""
    random.Random(seed).shuffle(lines)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return lines


def answers(place: Path, rows: int) -> tuple[Counter[str], Refused]:
    """Write rows of answers without scores. Return the counts that the import must give, and what it must refuse."""
    groups, contradicted, repeated = rows * 24 // 100, rows // 400, rows * 13 // 400

    def row(group: int, member: int, wrong: int = 0) -> str:
        ids = {"ticket": f"t{group}", "answer_id": f"t{group}-a{member}"}
        return json.dumps({**ids, "prompt": [1, group % 97, group // 97], "response": [2, member, wrong]})

    lines = [row(group, member) for group in range(groups) for member in range(GROUP)]
    lines += [row(group, 1, wrong=1) for group in range(contradicted)]
    lines += [row(contradicted + i % (groups - contradicted), i % GROUP) for i in range(repeated)]
    lines += ['{"ticket": "t1", "answer_id"'] * (rows - len(lines))
    refused: Refused = Counter()
    first: set[str] = set()
    for number, line in enumerate(write(place / "answers.jsonl", lines, seed=1), 1):
        if not line.endswith("}"):
            refused[f"answers.jsonl, line {number}", "unreadable"] += 1
            continue
        ticket = json.loads(line)["ticket"]
        if ticket not in first and int(ticket[1:]) < contradicted:  # a refused group stands at its first line
            refused[f"answers.jsonl, line {number}", "id"] += 1
        first.add(ticket)
    taken = groups - contradicted
    return Counter(groups=taken, completions=taken * GROUP, repeated=repeated, contradicted=contradicted), refused


def scores(place: Path, rows: int, expected: Counter[str]) -> tuple[Counter[str], Refused]:
    """Write scores for most of the answers. Return the counts that a loop over the lines gives, and the refusals."""
    stored = [
        f"t{expected['contradicted'] + group}-a{member}"
        for group in range(expected["groups"])
        for member in range(GROUP)
    ]
    chosen = random.Random(2).sample(stored, rows * 90 // 100)
    again, other, empty = rows * 4 // 100, rows * 2 // 100, rows // 200

    def line(name: str, score: object) -> str:
        return json.dumps({"answer_id": name, "score": score})

    lines = [line(name, i % 2) for i, name in enumerate(chosen)]
    lines += [line(name, i % 2) for i, name in enumerate(chosen[:again])]
    lines += [line(name, 0.5) for name in chosen[again : again + other]]
    lines += [line(f"unknown-{i}", 1) for i in range(rows * 2 // 100)]
    lines += [line(chosen[i], "good") for i in range(empty)] + [line(chosen[i], None) for i in range(empty)]
    lines += ["not JSON"] * (rows - len(lines))
    known: dict[str, object] = {}
    counts, refused, present = Counter[str](), Counter[tuple[str, str]](), set(stored)
    for number, text in enumerate(write(place / "scores.jsonl", lines, seed=3), 1):
        reason = ""
        row = json.loads(text) if text.endswith("}") else {}
        name, score = row.get("answer_id"), row.get("score")
        if not row:
            reason = "unreadable"
        elif name not in present:
            reason = "unknown-completion"
        elif score is None:
            counts["waiting"] += 1
        elif score == "good":
            reason = "reward"
        elif known.setdefault(name, score) != score:
            reason = "conflict"
        else:
            counts["right"] += 1
        if reason:
            refused[f"line {number}", reason] += 1
    counts["new"] = len(known)
    counts["known"] = counts["right"] - len(known)
    counts["pending"] = len(stored) - len(known)
    return counts, refused


def named(refused: Refused, name: str) -> Refused:
    """Return the refusals with the name of the file at each line."""
    return Counter({(f"{name}, {where}", reason): count for (where, reason), count in refused.items()})


def reasons(refused: Refused) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(reason for _, reason in refused).most_common())


def measure(place: Path, rows: int) -> list[Figure]:
    groups, bad_rows = answers(place, rows)
    take = ["import", "answers.jsonl", "--into", "log", "--task", "support", "--source", "model:ours"]
    take += ["--columns", "group=ticket"]
    first = run(place, *take)
    imported = first.refused == bad_rows and first.has(
        f"imported     {groups['groups']} groups, {groups['completions']} completions, "
        f"{groups['groups'] * 3 + groups['completions'] * 3} tokens",
        f"  and        {groups['repeated']} rows that repeat a row of their group",
        f"quarantined  {bad_rows.total()}",
    )
    counts, bad_lines = scores(place, rows, groups)
    joined = run(place, "feedback", "log", "scores.jsonl")
    exact = joined.refused == named(bad_lines, "scores.jsonl") and joined.has(
        f"read      {rows} lines",
        f"new       {counts['new']} scores",
        f"known     {counts['known']} that the log has with the same score",
        f"waiting   {counts['waiting']} lines whose score is null",
        f"refused   {bad_lines.total()}",
    )
    exact = exact and pending(place) == counts["pending"]
    second_import, second = run(place, *take), run(place, "feedback", "log", "-", stdin=place / "scores.jsonl")
    twice = second_import.refused == bad_rows and second_import.has(
        "imported     0 groups, 0 completions, 0 tokens",
        f"skipped      {groups['groups']} groups that are already in the log",
    )
    twice = twice and second.refused == named(bad_lines, "stdin") and pending(place) == counts["pending"]
    twice = twice and second.has("new       0 scores", f"known     {counts['new'] + counts['known']} that the log has "
                                 "with the same score")  # fmt: skip
    for done, fine in ((first, imported), (joined, exact), (second_import, twice), (second, twice)):
        if not fine:
            print(done.output)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    about = f"real commands in their own processes; at most {peak:.0f} MB; {machine()}"
    return [
        Figure(
            "first-day.4.import",
            "rows of answers with own ids, repeated rows, contradictions and broken lines: counts and refused lines",
            "exact",
            f"{groups['groups']:,} groups, {groups['repeated']:,} repeated rows, {bad_rows.total():,} refused",
            f"of {rows:,} rows",
            imported,
            rows,
            f"refused with their lines: {reasons(bad_rows)}; {first.seconds:.0f} s; {about}",
        ),
        Figure(
            "first-day.4.feedback",
            "lines of scores, some repeated, contradicting, unknown or broken: counts and refused lines",
            "exact",
            f"{counts['new']:,} new, {counts['known']:,} known, {bad_lines.total():,} refused",
            f"of {rows:,} lines",
            exact,
            rows,
            f"refused with their lines: {reasons(bad_lines)}; {counts['pending']:,} completions are left in "
            f"`offbeat log pending`; {joined.seconds:.0f} s; {about}",
        ),
        Figure(
            "first-day.4.twice",
            "the same two files a second time, the scores through a pipe: what is added, and what is refused",
            "nothing added, the same lines refused",
            f"0 groups and 0 scores, {bad_rows.total() + bad_lines.total():,} refused" if twice else "different",
            f"of {2 * rows:,} rows",
            twice,
            2 * rows,
            f"{second_import.seconds:.0f} s and {second.seconds:.0f} s; {about}",
        ),
    ]


def pending(place: Path) -> int:
    """Return how many completions `offbeat log pending` lists."""
    command = [*OFFBEAT, "log", "pending", "log", "--jsonl"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=True).stdout.count("\n")


if __name__ == "__main__":
    chosen = command_parser(__doc__, short="1,000 rows, and record nothing").parse_args()
    with tempfile.TemporaryDirectory(prefix="offbeat-feedback-") as directory:
        sys.exit(not report(chosen.short, *measure(Path(directory), 1_000 if chosen.short else 100_000)))
