"""SIGKILL during a save of a checkpoint: at random moments, and with strace at each system call of a save.

A process restores the newest checkpoint, sends what it found, and continues to train and save. It must find at least
the last acknowledged step, with every bit that this step has in an undisturbed run.
"""

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
from lab.fixtures.strace import allow_strace, attach, kill_at
from offbeat.trainer.checkpoint import Checkpoints
from tests.fixtures.processes import Send, Work, fork, kill, read_lines, run_to_end
from tests.fixtures.small_trainer import digest_of, small_batch, small_trainer

CALLS = ("write", "fsync", "rename", "unlink", "unlinkat", "rmdir", "mkdir", "openat")
MOST = 400
"""Limit on the calls of one kind in one save; more would mean that the loop does not end."""
SAVES = 60
"""Saves of one process: enough for a kill to come before the last."""


def saving(place: Path, saves: int, start_pipe: int | None = None) -> Work:
    """Restore, then train and save `saves` times and send each. With `start_pipe`, wait for a byte from it first."""

    def work(send: Send) -> None:
        torch.set_num_threads(1)
        allow_strace()
        trainer = small_trainer()
        with Checkpoints(place, config=None) as checkpoints:
            if (newest := checkpoints.newest()) is not None:
                newest.restore(trainer)
            send(f"restored {trainer.step} {digest_of(trainer)}")
            if start_pipe is not None:
                os.read(start_pipe, 1)
            for _ in range(saves):
                trainer.train(small_batch(trainer.step))
                send(f"saving {trainer.step} {digest_of(trainer)}")
                checkpoints.save(trainer, {"step": trainer.step})
                checkpoints.wait()
                send(f"saved {trainer.step} {digest_of(trainer)}")

    return work


@dataclass
class Tried:
    """The results of kills."""

    kills: int = 0
    problems: list[str] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    """The first digest of each step."""
    acknowledged: int = 0

    def take(self, lines: list[str]) -> None:
        """Check the lines that a process sent."""
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
                self.problems.append(f"step {begun} was acknowledged, but step {step} was restored")
            if word == "saved":
                self.acknowledged = max(self.acknowledged, step)


def killed_while_saving(place: Path, kills: int, rng: random.Random) -> Tried:
    """Kill at a random moment of a random save, again and again, in one directory."""
    tried = Tried()
    tried.take(run_to_end(saving(place, 3)))
    typical = 0.05
    while tried.kills < kills:
        pid, pipe = fork(saving(place, SAVES))
        text, begun = read_until(pipe, "saving", rng.randint(1, 4))
        select.select([], [], [], rng.uniform(0, 1.3 * typical))
        kill(pid)
        text += b"\n".join(line.encode() for line in read_lines(pipe))
        os.waitpid(pid, 0)
        lines = [line for line in text.decode().split("\n") if line]
        tried.take(lines)
        if lines[-1].startswith("saving"):
            tried.kills += 1
        else:
            typical = 0.9 * typical + 0.1 * (time.monotonic() - begun)
    tried.take(run_to_end(saving(place, 1)))
    return tried


def read_until(pipe: int, word: str, times: int) -> tuple[bytes, float]:
    """Read up to the n-th line with a word. Return the text and the time.

    It reads byte by byte, so that later lines stay in the pipe.
    """
    text = b""
    while text.count(word.encode()) < times or not text.endswith(b"\n"):
        byte = os.read(pipe, 1)
        if not byte:
            break
        text += byte
    return text, time.monotonic()


def killed_at(call: str, when: int) -> tuple[bool, list[str]]:
    """Kill a save that also prunes at the `when`-th such call. Return whether it was killed, and the problems."""
    with tempfile.TemporaryDirectory(prefix="offbeat-kill-") as temporary:
        place, report = Path(temporary) / "checkpoints", Path(temporary) / "strace.txt"
        tried = Tried()
        tried.take(run_to_end(saving(place, 2)))
        start_read, start_write = os.pipe()
        pid, pipe = fork(saving(place, 1, start_read))
        os.close(start_read)
        text, _ = read_until(pipe, "restored", 1)
        tracer = attach(pid, report, kill_at(call, when))
        os.write(start_write, b"g")
        os.close(start_write)
        sent = [*text.decode().split("\n"), *read_lines(pipe)]
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
        tracer.wait()
        tried.take([line for line in sent if line])
        tried.take(run_to_end(saving(place, 1)))
        left = sorted(path.name for path in place.iterdir() if path.name != ".lock")
        if len(left) != 2 or not all(name.startswith("step-") for name in left):
            tried.problems.append(f"the directory holds {left}")
        return killed, tried.problems


def random_kills(kills: int, seed: int) -> list[Figure]:
    """Row trainer.3.checkpoint: kills at random moments."""
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
    """Row trainer.3.calls: kills at every system call."""
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
            "system calls of a save (file, read back, manifest, pruning) at which SIGKILL does damage",
            "0, every write, fsync and rename hit",
            len(problems),
            "calls",
            not problems and all(hit[call] for call in ("write", "fsync", "rename") if call in calls),
            hit.total(),
            f"with strace: {', '.join(f'{call} {n}' for call, n in hit.items())}; after each, the next process resumed "
            "with the right bits and left two checkpoints and nothing else",
        )
    ]
