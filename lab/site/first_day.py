"""Do what a new user does on the first day, step by step, and note how long it takes and how long it is silent.

    python -m lab.site.first_day path        installs into a new environment, then three times the quickstart and a run
                                             on data and a reward of one's own: rows first-day.7.install, .quickstart,
                                             .own-run, .path-first-output and .path-silence; 20 minutes
    python -m lab.site.first_day commands    every command, three times in a terminal and three times through a pipe:
                                             rows first-day.7.first-output and .silence; 20 minutes

`--times 1` repeats nothing; the rows say so. `--short` records nothing: no installation, a quickstart of two steps,
every command once through a pipe.
A user's own typing is not counted. `offbeat worker` is left out: it serves a run until it is stopped.
"""

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, machine, report
from lab.site.user_path import INSTALL
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.watched import Watched, watch

FIRST, SILENCE = 1.0, 3.0
"""Seconds: the goals for the first output, and for the longest time without output."""
TASK = """
import json
from pathlib import Path

examples = [json.loads(line) for line in (Path(__file__).parent / "sums.jsonl").read_text().splitlines()]


def reward(text, columns):
    return float(text.strip() == columns["answer"])
"""
SUMS = "".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(10))
ROLLOUTS = (
    '{"prompt": "1+1=", "completion": "2", "reward": 1.0}\n{"prompt": "1+1=", "completion": "3", "reward": 0.0}\n'
)
OWN_STEPS = 20
COMMANDS = (
    "--help",
    "explain",
    "explain ess",
    "objectives",
    "init",
    "check mine.toml",
    "doctor",
    "doctor --only cores",
    "log stats runs/mine/experience",
    "log fates runs/mine/experience",
    "view runs/mine --plain",
    "report runs/mine --out report.html",
    "eval runs/mine/experience --task mytask.py",
    "eval runs/quickstart/model --task mytask.py --prompts 8 --samples 2 --max-tokens 4",
    "score runs/mine/experience --task mytask.py",
    "export runs/mine {out}",
    "import rollouts.jsonl --into imported --task sums --source human --tokenizer runs/quickstart/model --dry-run",
    "resume runs/mine",
    "train mine.toml --out {out}",
)
"""Every command of a first day, on the run that `prepare` makes. `{out}` is a new name each time."""


def quickstart(offbeat: str, place: Path, *, terminal: bool, steps: Sequence[str] = ()) -> Watched:
    """Run the quickstart."""
    return watch([offbeat, "quickstart", *steps], place, terminal=terminal)


def own_run(offbeat: str, place: Path, *, terminal: bool) -> Iterator[Watched]:
    """Train on a JSONL file and a reward of one's own, with the model of the quickstart, and look at the result."""
    (place / "sums.jsonl").write_text(SUMS, encoding="utf-8")
    (place / "mytask.py").write_text(TASK, encoding="utf-8")
    (place / "rollouts.jsonl").write_text(ROLLOUTS, encoding="utf-8")
    yield watch([offbeat, "init", "quickstart", "--out", "mine.toml"], place, terminal=terminal)
    file = place / "mine.toml"
    text = file.read_text(encoding="utf-8")
    for pattern, new in (
        (r'^name = "arithmetic"', 'name = "mytask.py"'),
        (r"^options = .*", ""),
        (r"^steps = .*", f"steps = {OWN_STEPS}"),
        (r"^prompts_per_step = .*", "prompts_per_step = 16"),
    ):
        text, count = re.subn(pattern, new, text, flags=re.M)
        assert count == 1, f"{pattern} is not in the recipe"
    file.write_text(text, encoding="utf-8")
    for words in ("check mine.toml", "train mine.toml", "report runs/mine", "view runs/mine --plain"):
        yield watch([offbeat, *words.split()], place, terminal=terminal)


def path(short: bool, times: int) -> bool:
    """Rows of the path from installation to the report of an own run."""
    quick, own, steps = [], [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        offbeat, installed = (OFFBEAT, []) if short else _install(root / "venv")
        for number in range(1 if short else times):
            place = root / str(number)
            place.mkdir()
            terminal = number % 2 == 1  # by turns
            quick.append(quickstart(offbeat, place, terminal=terminal, steps=("--steps", "2") if short else ()))
            own.append(list(own_run(offbeat, place, terminal=terminal)))
            steps += [quick[-1], *own[-1]]
            for one in steps[-6:]:
                _print(one, terminal)
    quick_times = [one.seconds for one in quick]
    own_times = [sum(one.seconds for one in run) for run in own]
    parts = ", ".join(
        f"{run[0].command.split()[1]} {statistics.median(one.seconds for one in run):.1f} s"
        for run in zip(*own, strict=True)
    )
    fetched = ", ".join(f"{one.command} {one.seconds:.0f} s" for one in installed[1:])
    failed = [one.command for one in [*installed, *steps] if one.code]
    turns = "by turns through a pipe and in a terminal"
    spread = f"from {min(quick_times):.0f} to {max(quick_times):.0f} s; {machine()}"
    good = not failed
    return report(
        short,
        Figure("first-day.7.install", "installation from a clone into a new environment, step by step", "stated",
               round(sum(one.seconds for one in installed), 0), "s", good, 1,
               f"{fetched}; once, because it fetches a gigabyte; {machine()}"),
        Figure("first-day.7.quickstart", "offbeat quickstart, median", "<= 300 s",
               round(statistics.median(quick_times), 1), "s", good and statistics.median(quick_times) <= 300,
               len(quick_times),
               f"{turns}; {spread}"),
        Figure("first-day.7.own-run", f"own JSONL and own reward, {OWN_STEPS} steps: init, check, train, report, view",
               "<= 180 s", round(statistics.median(own_times), 1), "s",
               good and statistics.median(own_times) <= 180, len(own_times),
               f"{parts}; typing not counted; {machine()}"),
        *_waits("path-", "a command of this path", steps),
    )  # fmt: skip


def _install(venv: Path) -> tuple[str, list[Watched]]:
    pip = str(venv / "bin" / "pip")
    words = [[sys.executable, "-m", "venv", str(venv)], *([pip, "install", *what.split()] for what in INSTALL)]
    done = [watch(command, ROOT, terminal=False, environment={"PYTHONPATH": ""}) for command in words]
    for one in done:
        _print(one, terminal=False)
    return str(venv / "bin" / "offbeat"), done


def commands(short: bool, times: int) -> bool:
    """Rows of every command."""
    watched: list[tuple[Watched, bool]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        quickstart(OFFBEAT, place, terminal=False, steps=("--steps", "2"))
        list(own_run(OFFBEAT, place, terminal=False))
        for number in range(1 if short else times):
            for terminal in (False,) if short else (False, True):
                for at, words in enumerate(COMMANDS):
                    out = f"out-{number}-{int(terminal)}-{at}"
                    one = watch([OFFBEAT, *words.format(out=out).split()], place, terminal=terminal)
                    watched.append((one, terminal))
                    _print(one, terminal)
    return report(short, *_waits("", f"{len(COMMANDS)} commands", [one for one, _ in watched]))


def _waits(prefix: str, of: str, watched: Sequence[Watched]) -> list[Figure]:
    """Return the longest waits: for the first output, and between two outputs."""
    failed = [one.command for one in watched if one.code]
    used = f"processor time at the first output at most {max(one.processor for one in watched):.2f} s"
    now = f"an empty Python program takes {_interpreter_seconds():.2f} s; {machine()}"

    def figure(name: str, what: str, goal: float, values: Sequence[float], also: str) -> Figure:
        late = sum(value > goal for value in values)
        worst = watched[max(range(len(values)), key=values.__getitem__)].command
        note = (
            f"median {statistics.median(values):.2f} s; {late} of {len(values)} longer than the goal; worst: {worst}; "
            f"terminals and pipes; {also}{now}" + (f"; failed: {', '.join(failed)}" if failed else "")
        )
        return Figure(f"first-day.7.{prefix}{name}", f"{what} of {of}", f"<= {goal:g} s", round(max(values), 2), "s",
                      not late and not failed, len(values), note)  # fmt: skip

    return [
        figure("first-output", "longest wait for the first output", FIRST, [one.first for one in watched], f"{used}; "),
        figure("silence", "longest time without output", SILENCE, [one.silence for one in watched], ""),
    ]


def _interpreter_seconds() -> float:
    """Return how long an empty Python program takes now, to compare with."""
    begun = time.monotonic()
    watch([sys.executable, "-c", "pass"], ROOT, terminal=False)
    return time.monotonic() - begun


def _print(one: Watched, terminal: bool) -> None:
    where = "terminal" if terminal else "pipe"
    times = f"first {one.first:5.2f} s  silent {one.silence:5.2f} s  total {one.seconds:6.1f} s"
    print(f"{where:8}  {times}  code {one.code}  {one.command[:70]}", flush=True)
    if one.code:
        print(one.output[-2000:])


if __name__ == "__main__":
    parser = command_parser(__doc__, short="no installation, two steps, one repetition; record nothing")
    parts = {"path": path, "commands": commands}
    parser.add_argument("what", choices=parts)
    parser.add_argument("--times", type=int, default=3, help="repetitions")
    args = parser.parse_args()
    sys.exit(not parts[args.what](args.short, args.times))
