"""SIGKILL while a checkpoint is being written: at random instants, and by strace at each system call of a save.

A process restores the newest checkpoint, tells what it found, and trains and saves on. What it must find follows from a
run that nobody disturbs: at least the last step that was acknowledged, and that step's every bit.
"""

import ctypes
import os
import random
import select
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lab.figures import Figure
from lab.fixtures.processes import Say, Work, child, end, heard, outcome
from lab.fixtures.small_trainer import digest_of, small_batch, small_trainer
from lab.torture.weights_faults import ANY_PROCESS, PTRACER, attach
from offbeat.trainer.checkpoint import Checkpoints

CALLS = ("write", "fsync", "rename", "unlink", "unlinkat", "rmdir", "mkdir", "openat")
MOST = 400
"""Calls of one kind in one save; more would mean that the loop does not end."""
SAVES = 60
"""In a life: enough for a kill to come before the last."""


def saving(place: Path, saves: int, go: int | None = None) -> Work:
    """Restore, then train and save so many times, each acknowledged; with `go`, wait for the word first."""

    def work(say: Say) -> None:
        torch.set_num_threads(1)
        ctypes.CDLL(None).prctl(PTRACER, ANY_PROCESS, 0, 0, 0)  # lets strace attach where only parents may
        trainer = small_trainer()
        with Checkpoints(place, config=None) as checkpoints:
            if (newest := checkpoints.newest()) is not None:
                newest.restore(trainer)
            say(f"restored {trainer.step} {digest_of(trainer)}")
            if go is not None:
                os.read(go, 1)
            for _ in range(saves):
                trainer.train(small_batch(trainer.step))
                say(f"saving {trainer.step} {digest_of(trainer)}")
                checkpoints.save(trainer, {"step": trainer.step})
                checkpoints.wait()
                say(f"saved {trainer.step} {digest_of(trainer)}")

    return work


@dataclass
class Tried:
    """What kills did."""

    kills: int = 0
    lost: int = 0
    """Kills before the save was complete: the checkpoint before it was found."""
    problems: list[str] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """Of each step, as first met."""
    acknowledged: int = 0

    def take(self, lines: list[str]) -> None:
        """What a process said."""
        begun = self.acknowledged
        for line in lines:
            word, *rest = line.split()
            if word not in ("restored", "saving", "saved"):
                self.problems.append(line)
                continue
            step, digest = int(rest[0]), rest[1]
            if self.digests.setdefault(step, digest) != digest:
                self.problems.append(f"step {step} has other bits: {line}")
            if word == "restored" and step < begun:
                self.problems.append(f"step {begun} was acknowledged and {step} restored")
            if word == "saved":
                self.acknowledged = max(self.acknowledged, step)


def killed_while_saving(place: Path, kills: int, rng: random.Random) -> Tried:
    """Kill at a random instant of a random save, again and again, in one directory."""
    tried = Tried()
    tried.take(outcome(saving(place, 3)))
    typical = 0.05
    while tried.kills < kills:
        pid, hear = child(saving(place, SAVES))
        text, begun = said_until(hear, "saving", rng.randint(1, 4))
        select.select([], [], [], rng.uniform(0, 1.3 * typical))
        end(pid)
        text += b"\n".join(line.encode() for line in heard(hear))
        os.waitpid(pid, 0)
        lines = [line for line in text.decode().split("\n") if line]
        tried.take(lines)
        if lines[-1].startswith("saving"):
            tried.kills += 1
        else:
            typical = 0.9 * typical + 0.1 * (time.monotonic() - begun)
    tried.take(outcome(saving(place, 1)))
    return tried


def said_until(hear: int, word: str, times: int) -> tuple[bytes, float]:
    """What is said up to the n-th line with a word, byte by byte, so that nothing after it is taken."""
    text = b""
    while text.count(word.encode()) < times or not text.endswith(b"\n"):
        byte = os.read(hear, 1)
        if not byte:
            break
        text += byte
    return text, time.monotonic()


def killed_at(call: str, when: int) -> tuple[bool, list[str]]:
    """A save that also prunes, killed at the `when`-th such call; whether it was, and what is wrong afterwards."""
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as temporary:
        place, report = Path(temporary) / "checkpoints", Path(temporary) / "strace.txt"
        tried = Tried()
        tried.take(outcome(saving(place, 2)))
        go, send = os.pipe()
        pid, hear = child(saving(place, 1, go))
        os.close(go)
        text, _ = said_until(hear, "restored", 1)
        tracer = attach(pid, report, call, when)
        os.write(send, b"g")
        os.close(send)
        said = [*text.decode().split("\n"), *heard(hear)]
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        tracer.wait()
        tried.take([line for line in said if line])
        tried.take(outcome(saving(place, 1)))
        left = sorted(path.name for path in place.iterdir() if path.name != ".lock")
        if len(left) != 2 or not all(name.startswith("step-") for name in left):
            tried.problems.append(f"the directory holds {left}")
        return killed, tried.problems


def random_kills(kills: int, seed: int) -> list[Figure]:
    """The figure of kills at random instants."""
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as place:
        tried = killed_while_saving(Path(place), kills, random.Random(seed))
    for line in tried.problems[:10]:
        print("  ", line)
    return [
        Figure(
            "trainer.3.checkpoint",
            "kills by SIGKILL while a checkpoint was being written, after which a verified checkpoint resumed bitwise",
            f"{kills} of {kills}",
            f"{tried.kills - len(tried.problems)} of {tried.kills}",
            "kills",
            not tried.problems and tried.kills >= kills,
            tried.kills,
            f"one directory, {max(tried.digests)} steps in all; each process restored at least the last acknowledged "
            f"step, every bit of it as when it was saved",
        )
    ]


def every_call(calls: tuple[str, ...] = CALLS) -> list[Figure]:
    """The figure of kills at every system call."""
    hit: Counter[str] = Counter()
    problems: list[str] = []
    for call in calls:
        for when in range(1, MOST):
            killed, found = killed_at(call, when)
            problems += [f"{call} {when}: {line}" for line in found]
            if not killed:
                break
            hit[call] += 1
    for line in problems[:10]:
        print("  ", line)
    return [
        Figure(
            "trainer.3.calls",
            "system calls of a save (file, read back, manifest, pruning) at which SIGKILL did damage",
            "0, every write, fsync and rename hit",
            len(problems),
            "calls",
            not problems and all(hit[call] for call in ("write", "fsync", "rename") if call in calls),
            hit.total(),
            f"by strace: {', '.join(f'{call} {n}' for call, n in hit.items())}; after each, the next process resumed "
            "with the right bits and left two checkpoints and nothing else",
        )
    ]
