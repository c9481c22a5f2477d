"""Damage a run in 40 ways and ask `offbeat fsck`: `python -m lab.torture.fsck`. A few minutes.

A tiny run trains four steps. Every damage is done to a copy of it. `fsck` must say of the whole run that it is whole,
and find each damage.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.figures import Figure, command_parser, report
from lab.torture.weight_log_damage import make_run
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import SCHEMAS
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck import PartFinding, check_run
from tests.fixtures.damage import (
    Damage,
    checkpoints,
    cut,
    each,
    empty,
    flip,
    replace_by_directory,
    weight_damages,
)
from tests.fixtures.groups import make_group
from tests.fixtures.runs import scratch


@dataclass(frozen=True)
class Case:
    """A damage and its name."""

    name: str
    damage: Damage


def file_cases() -> Iterator[Case]:
    """Damages of small files."""
    for name in ("config.json", "environment.json"):
        yield Case(f"{name} is lost", _to(Path.unlink, name))
        yield Case(f"{name} is cut", _to(cut, name))
        yield Case(f"{name} is empty", _to(empty, name))
    yield Case("a setting in config.json is changed", _change_seed)
    yield Case("events.jsonl is lost", _to(Path.unlink, "events.jsonl"))
    yield Case("a byte in events.jsonl is flipped", _to(flip, "events.jsonl"))
    yield Case("events.jsonl ends with garbage", _add_garbage)
    yield Case("steps are missing in events.jsonl", _drop_steps)
    yield Case("the tokenizer is lost", _to(shutil.rmtree, "tokenizer"))
    yield Case("an index file is damaged", _damage_index)


def _to(damage: Callable[[Path], None], name: str) -> Damage:
    """Return the damage of one file or directory of a run."""
    return lambda run: damage(run / name)


def _change_seed(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"seed": 99}))


def _add_garbage(run: Path) -> None:
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\x00\xff\x00 not an event\n")


def _drop_steps(run: Path) -> None:
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"kind": "step"' not in line))


def _damage_index(run: Path) -> None:
    (run / "index").mkdir(exist_ok=True)
    (run / "index" / "000000004096.index").write_bytes(b"12345678 not an index")


def checkpoint_cases() -> Iterator[Case]:
    """Damages of checkpoints."""
    for file in ("manifest.json", "rank-0000.safetensors"):
        yield Case(f"a byte of {file} of the newest checkpoint is flipped", _to_newest(flip, file))
        yield Case(f"{file} of the newest checkpoint is lost", _to_newest(Path.unlink, file))
    yield Case("the newest checkpoint is cut", _to_newest(cut, "rank-0000.safetensors"))
    yield Case("a manifest of a checkpoint cannot be read", _to_newest(replace_by_directory, "manifest.json"))
    yield Case("no checkpoint is whole", _flip_all_checkpoints)
    yield Case("all checkpoints are lost", _to(shutil.rmtree, "checkpoints"))


def _to_newest(damage: Callable[[Path], None], file: str) -> Damage:
    return lambda run: damage(checkpoints(run)[-1] / file)


def _flip_all_checkpoints(run: Path) -> None:
    each(flip, (one / "manifest.json" for one in checkpoints(run)))


def _manifests(run: Path, table: str) -> list[Path]:
    """Return the manifests of a table, the newest first."""
    return sorted((run / "experience" / f"{table}.lance" / "_versions").glob("*.manifest"))


def _data(run: Path, table: str) -> Path:
    return max((run / "experience" / f"{table}.lance" / "data").iterdir(), key=lambda path: path.stat().st_size)


def experience_cases() -> Iterator[Case]:
    """Damages of the experience log."""
    for table in SCHEMAS:
        yield Case(f"{table}.lance is lost", _to(shutil.rmtree, f"experience/{table}.lance"))
    for table in ("groups", "events"):
        yield Case(f"a data file of {table}.lance is lost", _to_data(Path.unlink, table))
        yield Case(f"a data file of {table}.lance is cut", _to_data(cut, table))
        yield Case(f"all manifests of {table}.lance are empty", _to_manifests(empty, table))
        lose = _to_manifests(Path.unlink, table, all_but=2)
        yield Case(f"{table}.lance has lost its newest rows", lose)
    yield Case("an unfinished manifest is in groups.lance", _tear_next)
    yield Case("the experience log is lost", _to(shutil.rmtree, "experience"))
    yield Case("a byte of a group is flipped", lambda run: flip(_data(run, "groups"), 0.1))
    yield Case("an id is in the log twice with other content", _repeat_id)


def _to_data(damage: Callable[[Path], None], table: str) -> Damage:
    return lambda run: damage(_data(run, table))


def _to_manifests(damage: Callable[[Path], None], table: str, all_but: int = 0) -> Damage:
    """Return the damage of all manifests of a table but the oldest ones."""
    return lambda run: each(damage, _manifests(run, table)[: -all_but or None])


def _tear_next(run: Path) -> None:
    newest = _manifests(run, "groups")[0]
    content = newest.read_bytes()
    newest.with_name(f"{int(newest.stem) - 1:020}.manifest").write_bytes(content[: len(content) // 2])


def _repeat_id(run: Path) -> None:
    with ExperienceLog.open(run / "experience") as log:
        first = next(iter(log.groups())).id
        log.append([make_group(0, prefix=first[:-1], size=2)] if first.endswith("0") else [make_group(0)])


def cases(foreign: Path) -> list[Case]:
    """Return all damages."""
    weights: Mapping[str, Damage] = weight_damages(foreign)
    found = [*file_cases(), *checkpoint_cases(), *experience_cases()]
    return found + [Case(f"weights: {name}", damage) for name, damage in weights.items()]


def damages(found: list[PartFinding]) -> list[PartFinding]:
    return [one for one in found if one.remedy is not None]


def finds(case: Case, run: Path) -> bool:
    """Return whether the damage is found."""
    case.damage(run)
    found = damages(list(check_run(RunDirectory(run))))
    print(f"{case.name}: {found[0] if found else 'NOT FOUND'}", flush=True)
    return bool(found)


SHORT: Final = 6


def main() -> bool:
    short = command_parser(__doc__, short=f"{SHORT} damages").parse_args().short
    with scratch() as place:
        run, foreign = make_run(place), make_run(place, "seed=1")
        whole = damages(list(check_run(RunDirectory(run))))
        assert not whole, whole
        tried = cases(foreign / "weights")
        tried = tried[:: len(tried) // SHORT] if short else tried
        found = sum(finds(case, shutil.copytree(run, place / f"copy{at}")) for at, case in enumerate(tried))
    row = Figure("hardening.8", "injected damages that `offbeat fsck` finds", f"{len(tried)} of {len(tried)}",
                 f"{found} of {len(tried)}", "damages", found == len(tried), len(tried))  # fmt: skip
    return report(short, row)


if __name__ == "__main__":
    sys.exit(not main())
