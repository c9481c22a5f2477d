"""Groups from TRL to offbeat and back: what TRL generated, what offbeat's commands make of it, what TRL replays.

    python -m lab.parity.inside_trip            a minute; writes rows inside.6.*
    python -m lab.parity.inside_trip --short    nothing recorded

A run inside TRL writes a run directory. `offbeat log export` and `import` carry its groups to another log, an offline
run of ours trains on them, `report`, `view`, `log fates` and `fsck` take the run directory. Then TRL replays from the
second log, and from the log of a run of ours. Compared are tokens, log-probs and versions, completion by completion,
with what TRL's `_generate` returned and with the rows of TRL's batches.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lab.figures import ROOT, Figure, command_parser, report
from offbeat.config import parse
from offbeat.experience.reader import LogReader
from offbeat.inside.trl import OffPolicyGRPOTrainer
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train as train_ours
from offbeat.types import Completion, Group

sys.path.insert(0, str(ROOT))
from examples.inside_trl import tiny_llama, train  # found thanks to the line above

STEPS, V = 8, 4
TASK = """
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task


def sevens(text, columns):
    return text.split().count("7") / 8


task = Task("sevens", [Example(str(n), str(n), {}) for n in range(2, 24)], (Reward(sevens),))
"""
Generated = list[tuple[list[int], list[int], list[float], int]]
"""Prompt, answer, log-probs and version of each completion."""


def run_in_trl(place: Path, **settings: Any) -> tuple[Generated, list[tuple[Group, dict[str, Tensor], int]]]:
    """Train inside TRL. Return what was generated, and the past groups with the rows of the batch that hold them."""
    generated: Generated = []
    replayed: list[tuple[Group, dict[str, Tensor], int]] = []
    generate, append = OffPolicyGRPOTrainer._generate, OffPolicyGRPOTrainer._append

    def remember(self: OffPolicyGRPOTrainer, prompts: list[Any]) -> Any:
        found = generate(self, prompts)
        generated.extend((*row, self.served or 0) for row in zip(found[0], found[1], found[4], strict=True))
        return found

    def watch(self: OffPolicyGRPOTrainer, batch: dict[str, Tensor], groups: list[Group], size: int) -> None:
        fresh = len(batch["mask"])
        append(self, batch, groups, size)
        rows = {name: batch[name][fresh:].clone() for name in ("completion_ids", "mask", "behavior", "lags")}
        for number, group in enumerate(groups):
            own = {name: values[number * size : (number + 1) * size] for name, values in rows.items()}
            replayed.append((group, own, int(self.state.global_step)))

    with (
        patch.object(OffPolicyGRPOTrainer, "_generate", remember),
        patch.object(OffPolicyGRPOTrainer, "_append", watch),
    ):
        train(place, preset="grpo-off-policy", sync_every=V, steps=STEPS, **settings)
    return generated, replayed


def same(one: Completion, tokens: list[int], logprobs: list[float], version: int | None) -> bool:
    known: Any = one.behavior_logprobs
    close = len(known) == len(logprobs) and np.allclose(known, np.minimum(np.array(logprobs, np.float32), 0), atol=0)
    return bool(one.token_ids.tolist() == tokens and close and one.oldest_version == version)


def same_rows(group: Group, rows: dict[str, Tensor], step: int) -> int:
    """Return how many completions of a past group are in TRL's batch as they are in the log."""
    right = 0
    for row, one in enumerate(group.completions):
        length, known = len(one.token_ids), np.asarray(one.behavior_logprobs)
        lag = -1 if one.oldest_version is None else step - one.oldest_version
        right += (
            rows["completion_ids"][row, :length].tolist() == one.token_ids.tolist()
            and int(rows["mask"][row].sum()) <= length
            and np.array_equal(rows["behavior"][row, :length].numpy(), known)
            and set(rows["lags"][row, :length].tolist()) == {lag}
        )
    return right


def offbeat(*arguments: object) -> str:
    command = [str(Path(sys.executable).parent / "offbeat"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def own_run(place: Path, model: Path, experience: Path | None = None) -> None:
    """Run our own loop on the tiny model: with an experience log offline on its groups, else fresh."""
    task = place.parent / "task.py"
    task.write_text(TASK, encoding="utf-8")
    settings: dict[str, Any] = {
        "model": {"path": str(model), "compute": "float32", "serve": "float32"},
        "task": {"name": str(task), "scorers": 1},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 1e-3},
        "steps": 2,
        "prompts_per_step": 8,
        "group_size": 8,
    }
    if experience is not None:
        settings |= {"run": {"mode": "offline", "experience": str(experience)}, "sampler": {"mode": "offline"}}
    config = parse(settings)
    directory = RunDirectory(place)
    directory.create(config)
    train_ours(config, directory)


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model, tokenizer = tiny_llama()
        model.save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        generated, _ = run_in_trl(place / "trl")
        run, second = place / "trl" / "run", place / "second"
        groups = list(LogReader.open(run / "experience").groups())
        completions = [one for group in groups for one in group.completions]
        kept = sum(
            same(one, tokens, logprobs, v) for one, (_, tokens, logprobs, v) in zip(completions, generated, strict=True)
        )
        n = len(generated)
        what = "completions that TRL generated and the log holds: tokens, log-probs, versions"
        yield Figure("inside.6.to-the-log", what, f"{n} of {n}", kept, "completions", kept == n, n, "")

        offbeat("log", "export", run, place / "groups.parquet")
        offbeat("import", place / "groups.parquet", "--into", second)
        again = list(LogReader.open(second).groups())
        equal = sum(one == other for one, other in zip(groups, again, strict=True))
        what = "groups of TRL that are equal after offbeat log export and offbeat import"
        yield Figure(
            "inside.6.exported", what, f"{len(groups)}", equal, "groups", equal == len(groups), len(groups), ""
        )

        own_run(place / "offline", place / "model", second)
        page = offbeat("report", run, "--out", place / "report.html")
        said = [page, offbeat("view", run, "--plain"), offbeat("log", "fates", run), offbeat("fsck", run)]
        trained = f"{len(groups)} generated = {len(groups)} trained"
        told = ["the ledger balances" in said[0], groups[0].id in said[1], trained in said[2], trained in said[3]]
        what = "offbeat's commands on TRL's run directory: offline train, report, view, log fates, fsck"
        yield Figure("inside.6.commands", what, "5 of 5", 1 + sum(told), "commands", all(told), 5, "")

        own_run(place / "ours", place / "model")
        sources = {"exported": second, "ours": place / "ours" / "experience"}
        for name, log in sources.items():
            _, replayed = run_in_trl(place / f"trl-{name}", experience=log, replay=0.5)
            foreign = [one for one in replayed if one[0].oldest_version is None]
            rows = sum(same_rows(*one) for one in replayed)
            n = sum(len(group.completions) for group, _, _ in replayed)
            what = "completions of past groups whose rows in TRL's batches are as in the log"
            note = f"{len(foreign)} groups of {len(replayed)} are of the other log, without a version for this run"
            source = "TRL's exported groups" if name == "exported" else "a run of ours"
            held = rows == n > 0 and len(foreign) > 0
            yield Figure(
                f"inside.6.replayed-{name}", f"{what}; {source}", f"{n} of {n}", rows, "completions", held, n, note
            )


def main() -> bool:
    short = command_parser(__doc__, short="record nothing").parse_args().short
    torch.set_num_threads(1)
    return report(short, *figures())


if __name__ == "__main__":
    sys.exit(not main())
