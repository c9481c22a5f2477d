"""Two, three and four runs in one experience log, with workers outside of them; and a second `train` in a directory.

    python -m lab.torture.shared_log           minutes; writes rows hardening.6.*
    python -m lab.torture.shared_log --short   two runs of 40 steps, 10 attempts; records nothing

Each run trains concurrently in a thread of this process; `offbeat worker` adds a process to the first two of them.
Afterwards every lag that a run reported is compared with the log: it must be the lag of a group that this run's own
policy wrote. Groups that the run admitted must not expire.

For the second part, runs start in new directories while `offbeat train` is called for the same directories at random
moments, from before the first file is written until the end. Each call must be refused, and each run must end as if
nothing had happened.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from lab.figures import Figure, command_parser, report
from offbeat.config import Config, parse
from offbeat.experience.ledger import LedgerEventKind
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.types import Group
from tests.fixtures.runs import DIGITS_TASK
from tests.fixtures.tiny_model import save_model

OUTSIDE_WORKERS = 2
WORKER_START_SECONDS = 12
"""Until a worker has loaded its libraries; then it waits for the first version."""


def settings(model: Path, steps: int, seed: int, experience: Path | None = None) -> Config:
    """Return the configuration of one small concurrent run. Every second one replays, also groups of other runs."""
    replay = {"sampler": {"mode": "replay", "share": 0.25}} if seed % 2 else {}
    return parse(
        {
            "steps": steps,
            "seed": seed,
            "prompts_per_step": 4,
            "group_size": 4,
            "model": {"path": str(model), "compute": "float32", "serve": "float32"},
            "engine": {"kind": "hf", "max_prompt_tokens": 24},
            "sampling": {"max_tokens": 5},
            "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
            "task": {"name": str(DIGITS_TASK), "scorers": 1},
            "sync": {"every": 1},
            "workers": {"groups_at_once": 1},  # slow, so that groups from outside are needed
            **replay,
            "run": {"mode": "concurrent", "max_lag": 2, **({"experience": str(experience)} if experience else {})},
        }
    )


@dataclass
class SharedLogOutcome:
    """What became of the runs that shared a log."""

    steps: int = 0
    own: int = 0
    """Groups that a run trained and whose lag it knows."""
    foreign: int = 0
    """Groups of another run that a run trained, of unknown lag."""
    outside: int = 0
    """Own groups that a worker outside the run made."""
    wrong_lags: int = 0
    """Lags that a run reported and that are not those of its own groups at that step."""
    expired: int = 0
    """Groups that a run admitted and that expired."""
    surplus: int = 0
    """Groups of outside workers that expired."""
    failures: list[str] = field(default_factory=list)

    def add(self, directory: RunDirectory, config: Config) -> None:
        """Compare what a run reported with what the log holds."""
        own = directory.own_run(config)
        log = LogReader.open(config.run.experience)
        versions = {group.id: (group.oldest_version, _run_of(group)) for group in log.groups()}
        events = log.tables.events
        recorded = events.scan(0, events.rows(), ["group_id", "event", "step", "by", "run"]).to_pylist()
        mine = [event for event in recorded if event["by"] == own.trainer]
        if any(event["run"] != own.id for event in mine):
            self.failures.append(f"{own.id}: an event without the id of its run")
        trained = [event for event in mine if event["event"] == LedgerEventKind.TRAINED]
        expected: dict[int, Counter[int]] = {}
        for event in trained:
            version, run = versions[event["group_id"]]
            if run != own.id:
                self.foreign += 1
                continue
            self.own, self.outside = self.own + 1, self.outside + own.is_guest(event["group_id"])
            expected.setdefault(event["step"], Counter())[event["step"] - 1 - (version or 0)] += 1
        for step in (one for one in read(directory.events) if one["kind"] == "step"):
            self.steps += 1
            said: Counter[int] = Counter(cast(list[int], step["lags"]))
            right = expected.get(cast(int, step["step"]), Counter())
            self.wrong_lags += (said - right).total() + (right - said).total()
            if config.sampler.mode == "fresh":
                self.wrong_lags += sum(count for lag, count in said.items() if lag > config.fresh_lag)
        expired = [event["group_id"] for event in mine if event["event"] == LedgerEventKind.EXPIRED]
        self.surplus += sum(own.is_guest(name) for name in expired)
        self.expired += sum(not own.is_guest(name) for name in expired)


def _run_of(group: Group) -> str | None:
    return next((span.run for one in group.completions for span in one.versions), None)


def share_a_log(place: Path, model: Path, runs: int, steps: int) -> SharedLogOutcome:
    """Let runs train at the same time on one log, two of them with a worker outside."""
    configs = [settings(model, steps, seed, place / "experience") for seed in range(runs)]
    directories = [RunDirectory(place / f"run-{seed}") for seed in range(runs)]
    locks = [directory.create(config) for directory, config in zip(directories, configs, strict=True)]
    outcome = SharedLogOutcome()
    with ExitStack() as stack, ThreadPoolExecutor(runs) as pool:
        for directory in directories[:OUTSIDE_WORKERS]:
            faster = ["--set", "workers.groups_at_once=4"]
            command = [sys.executable, "-m", "offbeat", "worker", str(directory.path), *faster]
            worker = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(worker.terminate)
        time.sleep(WORKER_START_SECONDS)
        jobs = [
            pool.submit(train, config, directory, lock=lock)
            for config, directory, lock in zip(configs, directories, locks, strict=True)
        ]
        for job in jobs:
            if (error := job.exception()) is not None:
                outcome.failures.append(f"{type(error).__name__}: {error}")
    for directory, config in zip(directories, configs, strict=True):
        if directory.events.exists():
            outcome.add(directory, config)
    return outcome


def second_trains(place: Path, model: Path, attempts: int, chance: random.Random) -> tuple[int, list[str]]:
    """Call `offbeat train` for directories whose run starts or trains; return how many calls were harmless."""
    from typer.testing import CliRunner

    from offbeat.cli.main import app

    harmless, problems = 0, list[str]()
    each = 20
    for number in range(-(-attempts // each)):
        directory, config = RunDirectory(place / f"only-{number}"), settings(model, 100_000, seed=number)
        other = place / f"other-{number}.toml"
        other.write_text(_toml(settings(model, 7, seed=99)))
        loops: list[Loop] = []
        lock = directory.claim()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(_begin, directory, config, lock, loops, chance.uniform(0, 0.6))
            for _ in range(min(each, attempts - number * each)):
                time.sleep(chance.uniform(0, 0.6))
                result = CliRunner().invoke(app, ["train", str(other), "--out", str(directory.path)])
                refused = result.exit_code == 2 and isinstance(result.exception, SystemExit)
                recorded = (directory.path / "config.json").exists()
                if refused and (not recorded or directory.config() == config):
                    harmless += 1
                else:
                    problems.append(f"exit code {result.exit_code}: {result.output[-200:]}")
            while not loops and not running.done():
                time.sleep(0.1)
            for loop in loops:
                loop.stop("enough")
            if (error := running.exception()) is not None:
                problems.append(f"the run failed: {error}")
    return harmless, problems


def _begin(directory: RunDirectory, config: Config, lock: RunLock, loops: list[Loop], delay: float) -> None:
    """Write the files of a run whose directory is claimed, after a delay, and train until it is stopped."""
    time.sleep(delay)
    directory.record(config)
    train(config, directory, lock=lock, started=loops.append)


def _toml(config: Config) -> str:
    """Write the settings that differ from the defaults as TOML."""
    lines = ["steps = 7", f'model.path = "{config.model.path}"', 'engine.kind = "hf"', f'task.name = "{DIGITS_TASK}"']
    return "\n".join([*lines, "engine.max_prompt_tokens = 24", "sampling.max_tokens = 5"]) + "\n"


def main() -> int:
    parser = command_parser(__doc__, short="two runs of 40 steps, 10 attempts")
    parser.add_argument("--part", choices=["runs", "second", "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    short, good = arguments.short, True
    with tempfile.TemporaryDirectory(prefix="shared-log-") as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        save_model(model)
        for runs in [] if arguments.part == "second" else [2] if short else [2, 3, 4]:
            place = Path(scratch) / f"{runs}-runs"
            found = share_a_log(place, model, runs, steps=40 if short else 100)
            print(json.dumps(found.__dict__), flush=True)
            good &= report(short, _figure(runs, found))
        if arguments.part != "runs":
            attempts = 10 if short else 100
            harmless, problems = second_trains(Path(scratch), model, attempts, random.Random(arguments.seed))
            print("\n".join(problems[:5]))
            good &= report(
                short,
                Figure(
                    "hardening.6.second", "a second `train` in the directory of a run, at random moments: harmless",
                    "all", harmless, f"of {attempts}", harmless == attempts and not problems, attempts,
                ),
            )  # fmt: skip
    return 0 if good else 1


def _figure(runs: int, found: SharedLogOutcome) -> Figure:
    wrong = found.wrong_lags + found.expired + len(found.failures)
    return Figure(
        f"hardening.6.runs-{runs}",
        f"{runs} runs and {min(runs, OUTSIDE_WORKERS)} outside workers in one log: lags of other runs' groups, and "
        "admitted groups that expired",
        "0", wrong, "groups", wrong == 0 and min(found.own, found.foreign, found.outside) > 0,
        found.own + found.foreign,
        note=f"{found.steps} steps; {found.own} own groups trained, {found.outside} of them from outside workers; "
        f"{found.foreign} groups of other runs trained with unknown lag; {found.surplus} surplus groups of outside "
        "workers expired",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
