"""Defects that stopped new users: each is tried through the command line or the API, at an earlier commit and now.

    python -m lab.site.first_defects     rows first-day.1.*; a quarter of an hour

Every probe is a small program that a user would write; it says what it saw, and whether that is right. `--short` tries
three of them, now only, and records nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.house.earlier import BEFORE, earlier_checkout
from tests.fixtures.processes import INTERRUPTIBLE
from tests.fixtures.tiny_model import save_model

TASK: Final = """
examples = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]

def reward(text, columns):
    return float(sum(letter.isdigit() for letter in text) >= 2)
"""
RUN: Final = """
steps = 2
prompts_per_step = 4
group_size = 4
[model]
path = "model"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
max_prompt_tokens = 16
[sampling]
max_tokens = 5
[task]
name = "mytask.py"
scorers = 1
"""
OFFLINE: Final = (
    RUN.replace("steps = 2", "steps = 200")
    + """
[objective]
preset = "asymre"
[sampler]
mode = "offline"
epochs = 1
[run]
mode = "offline"
experience = "log"
"""
)
IN_A_LOOP: Final = """
import asyncio, offbeat
async def cell():
    return offbeat.train("run.toml", out="looped")
print("state:", asyncio.run(cell()).state)
"""
BURN: Final = "while True: pass"


@dataclass(frozen=True)
class User:
    """A directory of a user, with a model and a task, and the source tree that is tried."""

    tree: Path
    place: Path

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """Start a command in a process group of its own, as a terminal does."""
        environment = os.environ | {"PYTHONPATH": str(self.tree / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200",
                                    "XDG_CACHE_HOME": str(self.place / "cache")}  # fmt: skip
        return subprocess.Popen(words, cwd=self.place, env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def run(self, *words: str, program: list[str] | None = None, seconds: float = 180.0) -> str:
        """Run `offbeat` with these words and return what it prints; ends with `[timeout]` if it takes too long."""
        process = self.start([*(INTERRUPTIBLE if program is None else program), *words])
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + "[timeout]"

    def write(self, name: str, text: str) -> None:
        (self.place / name).write_text(text, encoding="utf-8")

    def import_answers(self) -> str:
        """Import 8 groups of 4 answers by people, which have neither a version nor log-probs."""
        rows = [
            {"prompt": f"{i}+1=", "completion": f"{i}{j}", "reward": float(j % 2)} for i in range(8) for j in range(4)
        ]
        self.write("answers.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return self.run("import", "answers.jsonl", "--into", "log", "--task", "mytask.py", "--source", "human",
                        "--tokenizer", "model")  # fmt: skip


Probe = Callable[[User], tuple[bool, str]]


def offline_ends(user: User) -> tuple[bool, str]:
    """An offline run that has used up its epochs ends well."""
    user.import_answers()
    user.write("run.toml", OFFLINE)
    output = user.run("train", "run.toml", "--out", "run", seconds=150)
    return "used up" in output and "[timeout]" not in output, _last(output)


def check_counts(user: User) -> tuple[bool, str]:
    """`check` says how many steps a log holds."""
    user.import_answers()
    user.write("run.toml", OFFLINE)
    output = user.run("check", "run.toml")
    return "= 2 steps" in output, next((line for line in output.splitlines() if line.startswith("offline")), "")


def ctrl_c_early(user: User) -> tuple[bool, str]:
    """Ctrl-C before the first step ends with a sentence."""
    user.write("run.toml", RUN)
    process = user.start([*INTERRUPTIBLE, "train", "run.toml", "--out", "run"])
    events = user.place / "run" / "events.jsonl"
    while process.poll() is None and not (events.exists() and events.read_text()):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=180)[0]
    return "Traceback" not in output and "resume" in output, _last(output)


def task_name(user: User) -> tuple[bool, str]:
    """`import --task mytask.py` stores the name that a run stores."""
    import lance

    user.import_answers()
    names = set(lance.dataset(str(user.place / "log" / "groups.lance")).to_table(["task"])["task"].to_pylist())
    return names == {"mytask"}, f"the log has {sorted(names)}, a run stores 'mytask'"


def unknown_lag(user: User) -> tuple[bool, str]:
    """The lag of answers without a version is shown as unknown."""
    user.import_answers()
    user.write("run.toml", OFFLINE.replace("steps = 200", "steps = 2"))
    output = user.run("train", "run.toml", "--out", "run")
    line = next((line for line in output.splitlines() if line.startswith("step 2/2")), _last(output))
    return "lag unknown" in line, line


def own_groups(user: User) -> tuple[bool, str]:
    """A run's report counts only its own groups when another run shares its log."""
    shared = RUN + '[run]\nexperience = "log"\n'
    user.write("run.toml", shared)
    user.run("train", "run.toml", "--out", "one")
    user.write("run.toml", shared.replace("steps = 2", "steps = 4"))
    user.run("train", "run.toml", "--out", "two")
    user.run("report", "one", "--out", "report.html")
    page = re.sub(r"<[^>]*>|\s+", " ", (user.place / "report.html").read_text(encoding="utf-8"))
    found = re.findall(r"(\d+) (?:groups )?(?:generated|appended)", page)
    return bool(found) and max(map(int, found)) <= 8, f"8 groups are its own; the report says {sorted(set(found))}"


def in_a_loop(user: User) -> tuple[bool, str]:
    """`offbeat.train` works inside a running event loop."""
    user.write("run.toml", RUN)
    output = user.run(program=[sys.executable, "-c", IN_A_LOOP])
    return "state: finished" in output, _last(output)


def install_advice(user: User) -> tuple[bool, str]:
    """Advice to install an extra works in a checkout."""
    user.write("run.toml", RUN + '[run]\nplace = "ray"\n')
    hidden = (
        "import importlib.util as util; real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'ray' else real(name, *rest)\n"
        "from offbeat.cli.main import main; main()"
    )
    output = user.run("check", "run.toml", program=[sys.executable, "-c", hidden])
    found = re.search(r"pip install[^,]*", output)
    return "[ray]" in output and "'offbeat[ray]'" not in output, found[0] if found else _last(output)


def learning_rate(user: User) -> tuple[bool, str]:
    """`optimizer.lr` leads to the learning rate."""
    user.write("run.toml", RUN + "[optimizer]\nlr = 1e-5\n")
    output = user.run("check", "run.toml")
    return "learning_rate" in output, next((line for line in output.splitlines() if "optimizer.lr" in line), "")


def missing_column(user: User) -> tuple[bool, str]:
    """`check` sees that a reward function names a column the data does not have."""
    user.write("mytask.py", TASK.replace("(text, columns)", "(completions, solution, **columns)"))
    user.write("run.toml", RUN)
    output = user.run("check", "run.toml")
    return "'solution'" in output, _last(output)


def same_estimate(user: User) -> tuple[bool, str]:
    """The same file gets the same estimate, also while the machine is busy."""
    user.write("run.toml", RUN)
    speeds, with_all_threads = [], ["env", "-u", "OMP_NUM_THREADS", *INTERRUPTIBLE]
    for busy in (0, 8, 0, 8):
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(busy)]
        found = re.search(r"([\d.e+]+) GFLOP/s", user.run("check", "run.toml", program=with_all_threads))
        speeds.append(float(found[1]) if found else 0.0)
        for process in burning:
            process.kill()
    return min(speeds) > 0 and max(speeds) <= 1.1 * min(speeds), f"{', '.join(f'{one:g}' for one in speeds)} GFLOP/s"


PROBES: Final[tuple[Probe, ...]] = (
    offline_ends, check_counts, ctrl_c_early, task_name, unknown_lag, own_groups, in_a_loop, install_advice,
    learning_rate, missing_column, same_estimate,
)  # fmt: skip


def main() -> bool:
    short = command_parser(__doc__, short="three probes of today's code").parse_args().short
    if short:
        return all(_try(ROOT, probe)[0] for probe in (learning_rate, missing_column, install_advice))
    with earlier_checkout() as before:
        rows = [_row(probe, _try(before, probe), _try(ROOT, probe)) for probe in PROBES]
    held = sum(row.holds for row in rows)
    total = Figure("first-day.1", f"defects shown at {BEFORE} and gone now", f"{len(rows)} of {len(rows)}",
                   f"{held} of {len(rows)}", "", held == len(rows), len(rows), machine())  # fmt: skip
    return record(*rows, total)


def _row(probe: Probe, before: tuple[bool, str], now: tuple[bool, str]) -> Figure:
    what = (probe.__doc__ or "").rstrip(".")
    seen = f"{'right' if before[0] else 'wrong'} before, {'right' if now[0] else 'wrong'} now"
    return Figure(f"first-day.1.{probe.__name__.replace('_', '-')}", what, "wrong before, right now", seen, "",
                  now[0] and not before[0], 1, f"before: {before[1]}; now: {now[1]}")  # fmt: skip


def _try(tree: Path, probe: Probe) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as place:
        user = User(tree, Path(place))
        save_model(user.place / "model")
        user.write("mytask.py", TASK)
        right, seen = probe(user)
        seen = seen.replace(place, "…").replace(str(ROOT), "…").strip()[:300]
    print(f"{probe.__name__}: {'right' if right else 'WRONG'}: {seen}", flush=True)
    return right, seen


def _last(output: str) -> str:
    return output.strip().splitlines()[-1] if output.strip() else ""


if __name__ == "__main__":
    sys.exit(not main())
