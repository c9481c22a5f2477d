"""A run that dies at any system call by which it changes its files has a copy to resume from.

    python -m lab.torture.deletion

Real runs are killed, some are damaged, and each is resumed in a process that is stopped before every call that opens a
file for writing, writes, renames, removes, links, cuts or forces to disk below the run directory. What is on disk at
that moment is what SIGKILL leaves: it is copied and judged. The executions rewind the weight log, set aside damaged and
unfinished checkpoints, publish, retire versions, rotate checkpoints, and compact the experience log. A copy is good if
the newest checkpoint is at least as new as the last one that was complete, every byte of it; if the weight log holds
what this checkpoint serves, and, until a newer checkpoint is complete, every state that it held before; if the
experience log opens, matches its digests and has the rows that the checkpoint needs; and if a resume would not refuse.
Of 20 points, a second execution is really killed by SIGKILL, and `offbeat.resume` continues to the end.

The loop, the trainer, both logs and the files are those of a run; only the workers are missing, because all groups that
are needed are in the log already. Takes about five minutes on two cores; an interrupted command continues after the
executions in `deletion.jsonl`.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import offbeat
from lab.figures import ROOT, Figure, command_parser, commit, report
from lab.fixtures.crash_points import trace
from offbeat.config import Config, parse
from offbeat.errors import OffbeatError
from offbeat.events import EventKind
from offbeat.experience.ledger import Fate
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import Snapshot
from offbeat.run.build import RunContext, make_loop
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory, prepare_resume
from offbeat.run.fsck import require_checkpoint
from offbeat.run.journal import read
from offbeat.run.learner import PUBLISHED_STATE, LocalLearner, RankLearner
from offbeat.run.local import train
from offbeat.run.sinks import open_journal
from offbeat.storage.store import LocalStore
from offbeat.trainer.checkpoint import Checkpoint, saved_folders
from offbeat.types import Json
from offbeat.weights.inspection import find_problem, read_manifests
from tests.fixtures.damage import anchors, checkpoints, flip
from tests.fixtures.processes import Send, Work, fork, read_lines, run_to_end
from tests.fixtures.runs import DIGITS_TASK
from tests.fixtures.tiny_model import save_model

GOAL: Final = 2_000
RESULTS: Final = ROOT / "lab" / "torture" / "deletion.jsonl"
RESUMED: Final = 20
"""Points that are really killed, and then resumed to the end."""
EARLIER: Final = "\n"
"""The end of a `saved.json` that was there before the execution."""
PARTS: Final = 2
"""Processes that share the executions."""


@dataclass(frozen=True)
class Template:
    """A real run that is killed by SIGKILL as soon as it has published a version."""

    name: str
    killed_at: int
    save_every: int = 2
    settings: Mapping[str, object] = field(default_factory=dict)

    def config(self, model: Path) -> Config:
        return parse(
            {
                "steps": 1000,
                "prompts_per_step": 4,
                "group_size": 4,
                "model": {"path": str(model), "compute": "float32", "serve": "float32"},
                "engine": {"kind": "hf"},
                "sampling": {"max_tokens": 5},
                "optimizer": {"learning_rate": 1e-3},
                "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
                "trainer": {"save_every": self.save_every},
                "task": {"name": str(DIGITS_TASK), "scorers": 1},
            }
            | dict(self.settings)
        )


YOUNG = Template("young", killed_at=5, save_every=100)
KILLED = Template("killed", killed_at=7)
ADAPTER = Template("adapter", killed_at=7, settings={"adapter": {"rank": 2}})
LONG = Template("long", killed_at=23, save_every=7)


def damage_newest(run: Path) -> None:
    flip(checkpoints(run)[-1] / "rank-0000.safetensors")


def leave_unfinished(run: Path) -> None:
    (checkpoints(run)[-1] / "manifest.json").unlink()


def damage_weights(run: Path) -> None:
    flip(anchors(run)[0])


@dataclass(frozen=True)
class Scenario:
    """A run that is resumed up to a step, for which its log has all groups."""

    name: str
    template: Template
    damage: Callable[[Path], None] = lambda run: None
    compacts: bool = False


SCENARIOS: Final = (
    Scenario("no checkpoint yet", YOUNG),
    Scenario("rewind", KILLED),
    Scenario("newest damaged", KILLED, damage_newest),
    Scenario("save was killed", KILLED, leave_unfinished),
    Scenario("weights damaged", KILLED, damage_weights),
    Scenario("weights lost", KILLED, lambda run: shutil.rmtree(run / "weights")),
    Scenario("adapter", ADAPTER, damage_newest),
    Scenario("retention", LONG),
    Scenario("retention, newest damaged", LONG, damage_newest),
    Scenario("compaction", LONG, compacts=True),
)
SHORT: Final = SCENARIOS[2:3]


def trained(template: Template, model: Path, place: Path) -> Work:
    """Train a run, and kill the process when the version is published."""

    def work(send: Send) -> None:
        def watch(event: Mapping[str, Json]) -> None:
            if event["kind"] == EventKind.PUBLISHED and event["version"] == template.killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

        directory, config = RunDirectory(place), template.config(model)
        directory.create(config).release()
        train(config, directory, watching=watch)

    return work


class Idle:
    """A member of the fleet that waits for ever."""

    groups = 0

    async def work(self) -> None:
        await asyncio.Event().wait()

    async def nudge(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def news(self) -> list[str]:
        return []


def resumed(place: Path, scenario: Scenario) -> Work:
    """Resume a run without workers up to the step of its last groups, as `offbeat.run.local` does; or compact."""

    def member(name: str, desk: Desk) -> Idle:
        return Idle()

    async def rates(step: int) -> Mapping[str, Json]:
        return {}

    def work(send: Send) -> None:
        directory = RunDirectory(place)
        config = directory.config().model_copy(update={"steps": scenario.template.killed_at})
        with prepare_resume(directory, [], None, accept_changes=False)[1], ExitStack() as stack:
            context = RunContext.load(config, directory)
            context.tokenizer.save_pretrained(directory.tokenizer)
            rank = RankLearner.open(config, directory, context.task, context.tokenizer, stack)
            log = stack.enter_context(context.open_log(rank.trainer.policy_model.vocab_size, "driver"))
            journal = stack.enter_context(open_journal(directory, config.run.sinks, None))
            if scenario.compacts:
                for table in (log.tables.groups, log.tables.scores, log.tables.events, log.tables.quarantine):
                    for rows in (4, 16, 64, 1 << 20):
                        table.compact(rows)
                        table.clean(timedelta(0))
            loop = make_loop(context, log, journal, LocalLearner(rank), member, rates, rank.restore())
            asyncio.run(loop.run())
        send("ended")

    return work


@dataclass(frozen=True)
class Before:
    """What a run held before it was resumed."""

    step: int | None
    """That of its newest whole checkpoint; None if it has none."""
    states: frozenset[str]
    """The states of its versions that readers can load."""

    @classmethod
    def of(cls, run: Path) -> "Before":
        newest = newest_whole(run)
        store = LocalStore(run / "weights")
        found, _ = read_manifests(store)
        whole = frozenset(one.state for version, one in found.items() if not find_problem(store, found, version))
        return cls(newest.step if newest else None, whole)


def newest_whole(run: Path) -> Checkpoint | None:
    for folder in reversed(saved_folders(run / "checkpoints")):
        try:
            return Checkpoint.open(folder)
        except OffbeatError:
            continue
    return None


def held_states(run: Path) -> set[str]:
    """Return the states that the weight log holds or has set aside with all their files."""
    found = set()
    for path in [*(run / "weights").glob("versions/[0-9]*.json"), *(run / "weights").glob("superseded/[0-9]*.json")]:
        content = json.loads(path.read_bytes().partition(b"\n")[2])
        files = [file for file in (content["patch"], content["anchor"]) if file]
        if all((run / "weights" / file["name"]).is_file() for file in files):
            found.add(str(content["state"]))
    return found


def judge(run: Path, before: Before) -> list[str]:
    """Return what is wrong with the files that a killed process left."""
    problems = []
    directory = RunDirectory(run)
    try:
        require_checkpoint(directory)
        directory.config()
        directory.own_run(directory.config())
    except OffbeatError as error:
        problems.append(f"a resume would refuse: {error}")
    newest = newest_whole(run)
    mark = directory.saved.read_text() if directory.saved.exists() else EARLIER
    recorded = None if mark.endswith(EARLIER) else json.loads(mark)["step"]
    needed = max((step for step in (before.step, recorded) if step is not None), default=None)
    if needed is not None and (newest is None or newest.step < needed):
        problems.append(f"step {needed} was saved, and the newest whole checkpoint is {newest and newest.step}")
    if newest is None or newest.step == before.step:
        if gone := before.states - held_states(run):
            problems.append(f"{len(gone)} versions are gone before a newer checkpoint is complete")
    elif newest.manifest.extras[PUBLISHED_STATE] not in held_states(run):
        problems.append(f"the version that the checkpoint of step {newest.step} serves is gone")
    if newest is not None:
        rows = Snapshot.from_json(cast("dict[str, int]", newest.manifest.extras["snapshot"])).to_json()
        reader = LogReader.open(directory.experience)
        now = reader.snapshot().to_json()
        problems += [f"{name} has {now[name]} of {count} rows" for name, count in rows.items() if now[name] < count]
        problems += [f"groups differ from their digests: {found[:3]}" for found in [reader.damaged()] if found]
        reader.ledger().check()
    return problems


def judging(place: Path, before: Before, names: Mapping[int, str]) -> Work:
    """Judge and remove each copy in a directory, and send what is wrong with it."""

    def work(send: Send) -> None:
        for number, name in names.items():
            copy = place / str(number)
            try:
                problems = judge(copy, before)
            except Exception as error:  # a copy that cannot even be judged is a problem of this copy
                problems = [f"{type(error).__name__}: {error}"]
            if problems:
                send(f"point {number}, {name}: {'; '.join(problems)}")
            shutil.rmtree(copy)

    return work


def continued(place: Path, until: int) -> Work:
    """Resume to the end with workers, and check the ledger."""

    def work(send: Send) -> None:
        run = offbeat.resume(place, steps=until, progress=False)
        ended = [event for event in read(run.path / "events.jsonl") if event["kind"] == EventKind.ENDED][-1]
        ledger = LogReader.open(run.path / "experience").ledger()
        ledger.check()
        steps = {step for fate in ledger.fates.values() for step in fate.steps}
        if not ended["finished"] or ended["step"] != until or steps != set(range(1, until + 1)):
            raise AssertionError(f"it ended at step {ended['step']}, with {ledger.counts[Fate.TRAINED]} groups")
        send("continued")

    return work


def copy_of(source: Path, to: Path) -> Path:
    """Copy a run, also while a thread of it is inside a call."""
    for _ in range(5):
        try:
            return Path(shutil.copytree(source, to))
        except shutil.Error:  # a file was renamed meanwhile
            shutil.rmtree(to)
    raise OSError(f"{source} could not be copied")


def executed(scenario: Scenario, templates: Path, place: Path, samples: int) -> dict[str, Any]:
    """Execute a scenario once, judge every point, and really kill and resume at `samples` random ones."""
    place.mkdir()

    def prepared(name: str) -> Path:
        run = copy_of(templates / scenario.template.name, place / name)
        scenario.damage(run)
        if (saved := run / "saved.json").exists():
            saved.write_text(saved.read_text() + EARLIER)
        return run

    run, names = prepared("run"), dict[int, str]()
    [found] = run_to_end(lambda send: send(json.dumps(described(Before.of(run)))))
    before = Before(json.loads(found)["step"], frozenset(json.loads(found)["states"]))

    def copy(number: int, name: str) -> bool:
        copy_of(run, place / str(number))
        names[number] = name
        return True

    changes, lines = trace(resumed(run, scenario), str(run), copy)
    wrong = run_to_end(judging(place, before, names))
    resumes = []
    for number in sorted(random.Random(scenario.name).sample(range(1, changes + 1), min(samples, changes))):
        again = prepared(f"killed-{number}")
        trace(resumed(again, scenario), str(again), lambda at, _, last=number: at < last)  # type: ignore[misc]
        resumes.append(run_to_end(continued(again, scenario.template.killed_at + 1)))
    shutil.rmtree(place)
    return {
        "scenario": scenario.name,
        "commit": commit(),
        "points": changes,
        "good": changes - len(wrong),
        "calls": Counter(names.values()),
        "resumes": len(resumes),
        "continued": sum(one == ["continued"] for one in resumes),
        "ended": lines == ["ended"],
        "problems": [
            *wrong[:5],
            *([] if lines == ["ended"] else lines),
            *(str(o) for o in resumes if o != ["continued"]),
        ],
    }


def described(before: Before) -> dict[str, Any]:
    return {"step": before.step, "states": sorted(before.states)}


def main() -> None:
    parser = command_parser(__doc__, short="one execution, and two points that are killed and resumed")
    short = parser.parse_args().short
    scenarios, samples = (SHORT, 2) if short else (SCENARIOS, RESUMED // len(SCENARIOS))
    with tempfile.TemporaryDirectory(prefix="offbeat-deletion-") as temporary:
        place = Path(temporary).resolve()
        results = place / "results.jsonl" if short else RESULTS
        done = {str(one["scenario"]) for one in kept(results)}
        left = [one for one in scenarios if one.name not in done]
        run_to_end(lambda send: save_model(place / "model"))
        (place / "templates").mkdir()
        for template in {one.template.name: one.template for one in left}.values():
            run_to_end(trained(template, place / "model", place / "templates" / template.name))

        def part(number: int) -> Work:
            def work(send: Send) -> None:
                for at, scenario in enumerate(left):
                    if at % PARTS == number:
                        found = executed(scenario, place / "templates", place / f"scenario-{at}", samples)
                        with results.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(found) + "\n")

            return work

        parts = [fork(part(number)) for number in range(PARTS)]
        failed = [line for _, pipe in parts for line in read_lines(pipe)]
        for pid, _ in parts:
            os.waitpid(pid, 0)
        found = kept(results)
    for line in failed:
        print("  ", line)
    raise SystemExit(not report(short, figure(found, len(found) == len(scenarios))))


def kept(results: Path) -> list[dict[str, Any]]:
    """Return the newest execution of each scenario in a file of results; delete the file to begin again."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return list({one["scenario"]: one for one in map(json.loads, lines)}.values())


def figure(found: list[dict[str, Any]], complete: bool) -> Figure:
    points, good, resumes, well = (sum(one[key] for one in found) for key in ("points", "good", "resumes", "continued"))
    calls: Counter[str] = sum((Counter(one["calls"]) for one in found), Counter())
    for one in found:
        for problem in one["problems"]:
            print(f"   {one['scenario']}: {problem}")
    executions = ", ".join(f"{one['scenario']} {one['points']}" for one in found)
    return Figure(
        "trust.4",
        "crash points of resume, rewind, retention, compaction and checkpoint rotation at which a resumable "
        "copy exists",
        "2,000 of 2,000",
        f"{good:,} of {points:,}",
        "points",
        complete and good == points >= GOAL and well == resumes and all(one["ended"] for one in found),
        points,
        f"{executions}; calls: {', '.join(f'{name} {count}' for name, count in calls.most_common())}; "
        f"{well} of {resumes} points that were killed by SIGKILL were resumed to the end; executed at "
        + ", ".join(sorted({str(one["commit"]) for one in found})),
    )


if __name__ == "__main__":
    main()
