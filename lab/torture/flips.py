"""Flip single bits of a run directory, and crash runs: `python -m lab.torture.flips`. A quarter of an hour.

- 563 bits of `events.lance`, in every file of the table: `fsck` sees the flip, or it is without effect: the table reads
  back the same, and takes another event.
- 1,500 bits of all other files of the run: seen, healed by the next resume, or without effect on what a run reads.
- 50 runs with random rewards, each killed twice with SIGKILL and resumed to its end: `fsck` finds nothing wrong.

Each case is a forked process: torch is imported once. Results are kept in `flips.jsonl` beside this file, one line a
case, and a command that is started again continues after them; delete it to begin again.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Final

import lance
import numpy as np
import torch

from lab.figures import Figure, command_parser, commit, report
from lab.torture.weight_log_damage import CONFIG
from offbeat.config import Config, load
from offbeat.errors import OffbeatError
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import SCHEMAS
from offbeat.run.build import load_tokenizer
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck import check_run
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.storage.store import LocalStore
from offbeat.weights.inspection import read_calibration, read_manifests
from tests.fixtures.runs import scratch
from tests.fixtures.tiny_model import save_model

EVENT_FLIPS: Final = 563
OTHER_FLIPS: Final = 1500
CRASHED: Final = 50
KEPT: Final = Path(__file__).with_name("flips.jsonl")
RANDOM_TASK: Final = """
import random
from offbeat import Example, Reward, Task

def judge(text, columns):
    return random.random()

task = Task("judged", [Example(str(i), f"{i} + {i} = ", {"answer": i}) for i in range(40)], (Reward(judge),))
"""


def in_child(place: Path, work: Callable[[], str], *, kill_after: float | None = None) -> str:
    """Return what `work` returns in a forked process; "killed" if it was killed with SIGKILL after some seconds."""
    answer = place / f"answer-{os.getpid()}"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        with (place / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
            try:
                answer.write_text(work())
            except BaseException:
                answer.write_text("it raised " + traceback.format_exc(limit=-3))
            os._exit(0)
    if kill_after is not None:
        until = time.monotonic() + kill_after
        while time.monotonic() < until and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.01)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer.read_text() if answer.exists() else "killed"


def make_run(place: Path) -> Path:
    """Train a tiny run with random rewards and return its directory."""
    (place / "task.py").write_text(RANDOM_TASK)
    save_model(place / "model")
    words = {"steps": 4, "model": place / "model", "task": place / "task.py"}
    (place / "run.toml").write_text(CONFIG.format(**words))
    said = in_child(place, lambda: drive(place, "run"))
    assert said == "ended", said
    return place / "run"


def drive(place: Path, name: str, *settings: str) -> str:
    """Begin or resume the run of this name, in this process."""
    torch.set_num_threads(1)
    directory = RunDirectory(place / name)
    lock = None
    if (directory.path / "config.json").exists():
        config: Config = directory.config()
    else:
        config = load(place / "run.toml", settings)
        shutil.rmtree(directory.path, ignore_errors=True)  # killed before it had a configuration
        lock = directory.create(config)
    train(config, directory, lock=lock)
    return "ended"


def contents(run: Path) -> dict[str, str]:
    """Describe what a run reads of its directory: tables, record, settings, id, and the manifests of its weights."""
    directory = RunDirectory(run)
    found: dict[str, object] = {
        "config": directory.config(),
        "id": directory.name,
        "record": list(read(directory.events)),
    }
    for name in SCHEMAS:
        rows = lance.dataset(str(run / "experience" / f"{name}.lance")).to_table(with_row_id=True)
        found[name] = rows.select(sorted(rows.column_names)).to_pylist()
    store = LocalStore(run / "weights")
    found["weights"], found["probe"] = read_manifests(store), read_calibration(store)
    return {name: repr(one) for name, one in found.items()}


def judge(run: Path, file: Path, before: Mapping[str, str]) -> str:
    """Return what becomes of a flip in a file of a run."""
    try:
        if found := [one for one in check_run(RunDirectory(run)) if one.remedy is not None]:
            return "healed" if all("resume" in str(one.remedy) for one in found) else "seen"
        now = contents(run)
        if changed := [name for name in before if now[name] != before[name]]:
            return f"NOT SEEN: {file} changes {', '.join(changed)}"
        with ExperienceLog.open(run / "experience") as log:
            log.record([LedgerEvent("flips", LedgerEventKind.STARTED)])
            log.ledger().check()
    except OffbeatError:
        return "seen"
    if file.parts[0] == "tokenizer":
        load_tokenizer(RunDirectory(run).config()).save_pretrained(run / "tokenizer")  # as every start of a run does
        return "healed"
    return "without effect"


def flips(run: Path, files: Sequence[Path], count: int) -> Iterator[tuple[Path, int]]:
    """Yield about `count` bits, some of every file, and more of larger ones."""
    sizes = {file: 8 * (run / file).stat().st_size for file in files if (run / file).stat().st_size}
    least = max(1, count // (4 * len(sizes)))
    rest, total = max(0, count - least * len(sizes)), sum(sizes.values())
    ends = np.rint(np.cumsum([rest * bits / total for bits in sizes.values()])).astype(int)
    for (file, bits), more in zip(sizes.items(), np.diff(ends, prepend=0).tolist(), strict=True):
        for i in range(least + more):
            yield file, int((i + 0.5) * bits / (least + more)) ^ (i % 8)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[min(bit // 8, len(content) - 1)] ^= 1 << bit % 8
    path.write_bytes(content)


def one_flip(place: Path, run: Path, file: Path, bit: int, before: Mapping[str, str]) -> str:
    copy = place / f"copy-{os.getpid()}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, copy_function=shutil.copy2)
    flip(copy / file, bit)
    return in_child(place, lambda: judge(copy, file, before))


def one_crash(place: Path, number: int) -> str:
    """Kill a run twice at random moments, resume it to its end, and say what `fsck` finds."""
    draw, name = random.Random(number), f"crashed-{number}"
    settings = [f"seed={number}", "steps=24", "run.mode=concurrent", "run.max_lag=4", "sync.every=2"]
    for _ in range(2):
        said = in_child(place, lambda: drive(place, name, *settings), kill_after=draw.uniform(0.5, 3.0))
        if said not in ("killed", "ended"):
            return f"it did not run: {said}"
    said = in_child(place, lambda: drive(place, name, *settings))
    if said != "ended":
        return f"it did not end: {said}"

    def check() -> str:
        found = [str(one) for one in check_run(RunDirectory(place / name)) if one.remedy is not None]
        return "; ".join(found) or "nothing"

    return in_child(place, check)


Case = tuple[str, Callable[[], str]]


def run_cases(cases: Sequence[Case], known: dict[str, str], keep: Callable[[str, str], None]) -> dict[str, str]:
    """Run what is not known yet, in two processes; return the outcome of each case."""
    left = [case for case in cases if case[0] not in known]
    workers = []
    for part in range(2):
        if (child := os.fork()) == 0:
            try:
                for name, work in left[part::2]:
                    keep(name, work())
            finally:
                os._exit(0)
        workers.append(child)
    for child in workers:
        os.waitpid(child, 0)
    return known


def main() -> bool:
    short = command_parser(__doc__, short="40 flips and two crashed runs").parse_args().short
    events, others, crashed = (20, 20, 2) if short else (EVENT_FLIPS, OTHER_FLIPS, CRASHED)
    with scratch() as place:
        kept = place / "flips.jsonl" if short else KEPT
        at = commit()

        def keep(name: str, outcome: str) -> None:
            with kept.open("a") as file:
                file.write(json.dumps({"commit": at, "case": name, "outcome": outcome}) + "\n")

        def outcomes() -> dict[str, str]:
            lines = map(json.loads, kept.read_text().splitlines()) if kept.exists() else ()
            return {one["case"]: one["outcome"] for one in lines}

        run = make_run(place)
        said = in_child(place, lambda: json.dumps(contents(run)))  # this process must not use Lance: it forks
        assert said.startswith("{"), said
        before: dict[str, str] = json.loads(said)
        files = sorted(one.relative_to(run) for one in run.rglob("*") if one.is_file())
        of_events = [one for one in files if "events.lance" in one.parts]
        tried = [("events", *one) for one in flips(run, of_events, events)]
        tried += [("other", *one) for one in flips(run, [one for one in files if one not in of_events], others)]
        cases: list[Case] = []
        for number, (kind, file, bit) in enumerate(tried):
            cases.append((f"{kind} {number}", partial(one_flip, place, run, file, bit, before)))
        cases += [(f"crash {number}", partial(one_crash, place, number)) for number in range(crashed)]
        run_cases(cases, outcomes(), keep)
        found = outcomes()
    return rows(short, found)


def rows(short: bool, found: Mapping[str, str]) -> bool:
    figures = []
    for name, kind, what in (
        ("trust.6.events", "events", "single-bit flips in `events.lance` that are seen, or without effect"),
        ("trust.6", "other", "single-bit flips in other files of a run that are seen, healed or without effect"),
    ):
        mine = [outcome for case, outcome in found.items() if case.startswith(f"{kind} ")]
        good = Counter(one for one in mine if one in ("seen", "healed", "without effect"))
        print(*(one for one in mine if one not in good), sep="\n")
        figures.append(
            Figure(name, what, f"{len(mine)} of {len(mine)}", f"{good.total()} of {len(mine)}", "flips",
                   good.total() == len(mine), len(mine), ", ".join(f"{n} {one}" for one, n in good.items()))
        )  # fmt: skip
    crashed = [outcome for case, outcome in found.items() if case.startswith("crash ")]
    wrong = [one for one in crashed if one != "nothing"]
    print(*wrong, sep="\n")
    what = f"fsck's false alarms in {len(crashed)} crashed runs with random rewards"
    figures.append(Figure("trust.6.alarms", what, "0", len(wrong), "runs", not wrong, len(crashed)))
    return report(short, *figures)


if __name__ == "__main__":
    sys.exit(not main())
