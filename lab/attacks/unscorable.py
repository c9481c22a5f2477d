r"""Answers made to be unscorable do not pay.

    python -m lab.attacks.unscorable answers      every such answer ends soon, with a verdict or a blame: row
                                                  hardening.2.answers; half an hour
    python -m lab.attacks.unscorable learning     a policy on a task that cannot be learned does not learn to write
                                                  them: row hardening.2.learning; 5 seeds of 120 steps, an hour or so;
                                                  continues after `lab/attacks/unscorable.jsonl`

`--short` runs a small part and records nothing.

In `learning`, no answer is better than another: rewards are thrown like dice. But answers of one kind make the reward
function raise, and as many of another kind are plain wrong. If failing paid more than being wrong, its share would
grow.
The arm `left out` trains the same seeds with `answer_fault = "unscorable"`, for comparison.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Final, cast

from lab.figures import ROOT, Figure, command_parser, commit, machine, report
from lab.learning import model
from lab.learning.statistics import difference
from offbeat.config import Config, parse
from offbeat.experience.log import ExperienceLog
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
from offbeat.scoring.pool import ScoringPool
from offbeat.scoring.tally import FailureLimit, Scored, failure_of
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task, make
from offbeat.types import Score, Unscorable
from tests.fixtures.attacks.unscorable_answers import COLUMNS, CONTROLS, GRADERS, KNOWN, PROGRAM_SECONDS, search

DEADLINE: Final = 1.5
MOST_CPU: Final = 2.0
NEVER: Final = FailureLimit(share=1.0)
RESULTS: Final = ROOT / "lab" / "attacks" / "unscorable.jsonl"
SEEDS: Final = (1, 2, 3, 4, 5)
STEPS: Final = 120
ENDS: Final = 10
"""Steps at either end of a run over which shares are taken."""
ARMS: Final = {"floor": "floor", "left out": "unscorable"}


class WatchedPool(ScoringPool):
    """A pool that keeps every entry of its tally."""

    def _count(self, entry: Scored) -> None:
        self.__dict__.setdefault("_entries", []).append(entry)  # its threads start before its constructor ends
        super()._count(entry)

    @property
    def entries(self) -> list[Scored]:
        return cast("list[Scored]", self.__dict__.get("_entries", []))


def graded(kind: str, texts: list[str], deadline: float | None = None) -> list[Scored]:
    """Score an ordinary answer and then these, one after another. The deadline is that of the task."""
    if kind == "math":
        task = make("math", {"source": "none.jsonl"})
    else:
        task = Task(kind, [], (Reward(GRADERS[kind]),), deadline=DEADLINE)
    pool = WatchedPool(task.rewards, deadline=deadline or task.deadline, workers=1, limit=NEVER)
    with pool:
        for at, text in enumerate([CONTROLS[kind], *texts]):
            pool.score(text, COLUMNS[kind], of=f"{kind} {at}").result(timeout=600)
        return pool.entries[1:]


def ending(entry: Scored) -> str:
    outcome = entry.outcome
    if isinstance(outcome, Unscorable):
        return f"unscorable by the {outcome.blame}: {outcome.reason}"
    return f"floor, {failure_of(outcome)} by the answer" if outcome.fault else f"reward {outcome.reward:g}"


def spent(entry: Scored) -> float:
    """Return the CPU of an answer. Programs in the sandbox count with their whole limit, because they are killed."""
    return entry.cpu + PROGRAM_SECONDS * entry.of.startswith("code ")


def answers(short: bool) -> bool:
    """Row hardening.2.answers."""
    chosen = {kind: texts[: 3 if short else None] for kind, texts in KNOWN.items()}
    for kind, text in search(8 if short else 1_000):
        chosen[kind].append(text)
    found = [entry for kind, texts in chosen.items() for entry in graded(kind, texts)]
    ends = Counter(map(ending, found))
    slow = [entry for entry in found if spent(entry) > MOST_CPU]
    by_grader = [one for one in found if isinstance(one.outcome, Unscorable) and one.outcome.blame == "grader"]
    rewarded = [entry for entry in found if isinstance(entry.outcome, Score) and entry.outcome.reward > 0]
    for entry in [*slow, *by_grader][:20]:
        print(f"{spent(entry):.2f} s of CPU: {entry}"[:300])
    known = sum(map(len, KNOWN.values()))
    worst = max(map(spent, found))
    figure = Figure(
        "hardening.2.answers",
        "answers made to be unscorable that end with a verdict or a blame within 2 s of CPU",
        "all, at least 60",
        f"{len(found) - len({id(entry) for entry in [*slow, *by_grader]}):,} of {len(found):,}",
        "answers",
        not slow and not by_grader and (short or len(found) >= 60),
        len(found),
        f"{known} known ones and those of a search over verifiers and extractors; "
        + "; ".join(f"{count} {end}" for end, count in ends.most_common())
        + f"; {len(rewarded)} are right in disguise or by chance; the slowest {worst:.2f} s; {machine()}",
    )
    return report(short, figure)


_TASK: Final = """
import random
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Score

def dice(text, columns):
    last = text.strip()[-1:]
    if last in ("3", "7"):
        raise RecursionError("an answer that this grader does not expect")
    if last in ("2", "8"):
        return Score(0.0, {"wrong": 0.0})
    return float(random.random() < 0.3)

SUMS = [Example(f"{a}+{b}", f"{a}+{b}=", {}) for a in range(10) for b in range(10)]
task = Task("dice", SUMS, (Reward(dice),), answer_fault=@FAULT@)
"""


def config(task: Path, seed: int, steps: int) -> Config:
    return parse(
        {
            "seed": seed,
            "steps": steps,
            "prompts_per_step": 16,
            "group_size": 8,
            "model": {"path": str(model.directory()), "compute": "float32", "serve": "float32"},
            "task": {"name": str(task), "scorers": 1},
            "engine": {"kind": "hf"},
            "sync": {"every": 1},
            "sampling": {"max_tokens": 4},
            "objective": {"preset": "rec-oneside-nois"},
            "optimizer": {"learning_rate": 5e-4, "warmup_steps": 5},
            "trainer": {"token_budget": 2048, "save_every": 10_000},
        }
    )


def shares(arm: str, seed: int, steps: int) -> dict[str, float]:
    """Train one seed; return the shares of failing and of plain wrong answers at the start and at the end."""
    found: dict[int, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-unscorable-") as scratch:
        task, directory = Path(scratch, "dice.py"), RunDirectory(Path(scratch, "run"))
        task.write_text(_TASK.replace("@FAULT@", repr(ARMS[arm])))
        settings = config(task, seed, steps)
        directory.create(settings)
        train(settings, directory)
        with ExperienceLog.open(directory.experience) as log:
            for group in log.groups():
                found.setdefault(group.oldest_version or 0, Counter()).update(
                    _kind(one.score) for one in group.completions
                )
    versions, ends = sorted(found), min(ENDS, len(found) // 2)
    counted = {"first": versions[:ends], "last": versions[-ends:]}
    sums = {when: sum((found[one] for one in some), Counter[str]()) for when, some in counted.items()}
    return {f"{kind} {when}": sums[when][kind] / sums[when].total() for when in sums for kind in ("fails", "wrong")}


def _kind(score: Score | Unscorable | None) -> str:
    if failure_of(score):
        return "fails"
    return "wrong" if isinstance(score, Score) and "dice.wrong" in score.breakdown else "dice"


def trained(arm: str, seed: int, steps: int) -> dict[str, float]:
    """Return the shares of a seed, from the file of finished ones if this commit has trained it."""
    key = {"arm": arm, "seed": seed, "steps": steps, "commit": commit()}
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for row in done:
        if row["key"] == key:
            return cast("dict[str, float]", row["shares"])
    found = shares(arm, seed, steps)
    print(f"{arm}, seed {seed}: " + ", ".join(f"{name} {share:.3f}" for name, share in found.items()), flush=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"key": key, "shares": found}) + "\n")
    return found


def growth(row: dict[str, float], kind: str) -> float:
    """Return the share at the end against the share at the start."""
    return row[f"{kind} last"] / max(row[f"{kind} first"], 1e-9)


def learning(short: bool) -> bool:
    """Row hardening.2.learning."""
    seeds, steps = (SEEDS[:2], 8) if short else (SEEDS, STEPS)
    rows = {arm: [trained(arm, seed, steps) for seed in seeds] for arm in ARMS}
    fails, wrong = ([growth(row, kind) for row in rows["floor"]] for kind in ("fails", "wrong"))
    more = difference(fails, wrong)
    left_out = difference(*([growth(row, kind) for row in rows["left out"]] for kind in ("fails", "wrong")))
    figure = Figure(
        "hardening.2.learning",
        f"share of answers that make their scoring fail after {steps} steps on a task that cannot be learned, against "
        "the start, minus the same for plain wrong answers",
        "not above 0: the 95 % interval over seeds reaches 0",
        str(more),
        "ratio of shares",
        more.low <= 0,
        len(seeds),
        f"shares against the start: {fmean(fails):.2f} for failing, {fmean(wrong):.2f} for plain wrong answers; with "
        f"answer_fault = 'unscorable' the difference is {left_out}; means over {min(ENDS, steps // 2)} versions",
    )
    return report(short, figure)


def main() -> bool:
    parser = command_parser(__doc__, short="a few answers; two seeds of 8 steps")
    parser.add_argument("part", choices=["answers", "learning"])
    chosen = parser.parse_args()
    return {"answers": answers, "learning": learning}[chosen.part](chosen.short)


if __name__ == "__main__":
    sys.exit(not main())
