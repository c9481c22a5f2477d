"""Test the trainer under SIGKILL, lost ranks and little memory.

    python -m lab.torture.trainer resume            20 kills of a lagged run with replay, which must resume with the
                                                    same bits: row trainer.3.resume
    python -m lab.torture.trainer checkpoints       200 kills during a save, then one at each system call of a save:
                                                    rows trainer.3.checkpoint and trainer.3.calls
    python -m lab.torture.trainer updates           two gloo ranks against one process: row trainer.1.ranks
    python -m lab.torture.trainer ranks             two gloo ranks, one killed or stopped: rows trainer.4.*
    python -m lab.torture.trainer memory            the memory estimate against the measured peak, SmolLM2-135M: row
                                                    trainer.6.memory

Minutes each. `--short` runs a small part and records nothing. The parent starts no threads before it has forked its
last child.
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file

from lab.bench.memory_estimate import memory_estimates
from lab.figures import Figure, command_parser, report
from lab.torture.checkpoint_kills import every_call, random_kills, read_until
from lab.torture.resumed_run import SAVE_EVERY, SYNC_EVERY, history_of, running
from offbeat.errors import RankDied, RankLost, RankSilent
from offbeat.objective.presets import PRESETS
from offbeat.trainer.fsdp import Ranks
from offbeat.types import Json
from tests.fixtures.processes import fork, kill, read_lines, run_to_end
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import one_step_each, small_model, steps_with_checkpoints


def killed_runs(trials: int, steps: int, seed: int) -> list[Figure]:
    """Row trainer.3.resume: kill a run at a random moment and resume it, `trials` times, each in a new directory."""
    rng = random.Random(seed)
    at: list[int] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-resume-") as temporary:
        through = Path(temporary) / "through"
        begun = time.monotonic()
        ending = _ending(run_to_end(running(through, steps)))
        length = (time.monotonic() - begun) / steps
        expected = history_of(through)
        while len(at) < trials:
            place = Path(temporary) / f"{rng.getrandbits(64):016x}"
            pid, pipe = fork(running(place, steps))
            read_until(pipe, "step", rng.randint(1, steps))
            time.sleep(rng.uniform(0, length))
            kill(pid)
            sent = read_lines(pipe)
            os.waitpid(pid, 0)
            if _ending(sent):
                continue  # the run ended before the kill
            at.append(len(history_of(place)))
            resumed = _ending(run_to_end(running(place, steps)))
            if resumed != ending or history_of(place) != expected:
                problems.append(f"killed after step {at[-1]}: {resumed[-1:]}, expected {ending[-1:]}")
    for line in problems[:10]:
        print("  ", line)
    equal = trials - len(problems)
    return [
        Figure(
            "trainer.3.resume",
            "runs killed by SIGKILL at a random moment that resume bitwise like the uninterrupted run",
            f"{trials} of {trials}",
            f"{equal} of {trials}",
            "runs",
            equal == trials,
            trials,
            f"{steps} steps of 4 groups × 4, i = 2, v = {SYNC_EVERY}, half of each batch replayed, a checkpoint every "
            f"{SAVE_EVERY} steps, transformers engine, float32, one process; killed after step {sorted(at)}; compared: "
            "parameters, AdamW's state, torch's generator, groups drawn with their lags, all metrics of every step, "
            "repeated steps included, and the ledger",
        )
    ]


def _ending(sent: list[str]) -> list[str]:
    """Return the ledger and the final digest, or an empty list if the run did not end."""
    return [line for line in sent if not line.startswith("step")]


def same_updates(presets: Sequence[str]) -> list[Figure]:
    """Row trainer.1.ranks: one process against two ranks, a step of two updates with every preset."""
    loss, update = 0.0, 0.0
    before = {name: tensor.detach() for name, tensor in small_model().named_parameters()}
    with tempfile.TemporaryDirectory(prefix="offbeat-ranks-") as place:
        alone, both = one_step_each(Ranks(), presets, place, False), run_ranks(one_step_each, 2, (presets, place, True))
        for preset in presets:
            one, two = (load_file(f"{place}/{preset}-{name}.safetensors") for name in ("1-False", "2-True"))
            moved, apart = (torch.cat([(one[n] - other[n]).flatten() for n in one]).norm() for other in (before, two))
            update = max(update, float(apart / moved))
            loss = max([loss, *(abs(_loss(rank, preset) / _loss(alone, preset) - 1) for rank in both)])
    return [
        Figure(
            "trainer.1.ranks",
            "relative difference of loss and of the whole update, two FSDP2 ranks against one process: worst preset",
            "≤ 1e-6",
            float(f"{max(loss, update):.1e}"),
            "relative",
            max(loss, update) <= 1e-6,
            len(presets),
            f"float32, 11 groups × 4 in an odd number of micro-batches, i = 2, AdamW; loss {loss:.1e}, update "
            f"{update:.1e} of its norm; every preset, and grpo with a reference policy",
        )
    ]


def _loss(rank: Json, preset: str) -> float:
    return cast("dict[str, dict[str, float]]", rank)[preset]["loss"]


def lost_ranks(kills: int, stops: int, steps: int, seed: int) -> list[Figure]:
    """Rows trainer.4.*: kill or stop one of two ranks at a random step. The run must end, name it, and resume."""
    rng = random.Random(seed)
    waited: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    problems: list[str] = []
    equal = 0
    with tempfile.TemporaryDirectory(prefix="offbeat-ranks-") as temporary:
        through = run_ranks(steps_with_checkpoints, 2, (f"{temporary}/through", steps, 3))
        for number, sign in enumerate([signal.SIGKILL] * kills + [signal.SIGSTOP] * stops):
            place, rank = Path(temporary) / str(number), rng.randrange(2)
            seconds, problem = _strike(place, rank, sign, rng.randrange(1, steps), steps)
            waited[sign.name].append(seconds)
            problems += [problem] if problem else []
            resumed = run_ranks(steps_with_checkpoints, 2, (str(place), steps, 3))
            equal += all(_same_end(a, b, steps) for a, b in zip(through, resumed, strict=True))
    for line in problems[:10]:
        print("  ", line)
    n, longest = kills + stops, max(max(times, default=0.0) for times in waited.values())
    spans = "; ".join(f"{name}: {min(t):.1f} to {max(t):.1f} s" for name, t in waited.items() if t)
    return [
        Figure(
            "trainer.4.lost",
            "from a signal to one of two gloo ranks until the run has ended with an error that names it: the longest",
            "≤ 20 s, never a hang",
            round(longest, 1),
            "s",
            longest <= 20 and not problems,
            n,
            f"{kills} × SIGKILL, {stops} × SIGSTOP, at random steps and ranks; {spans}; {len(problems)} named wrongly",
        ),
        Figure(
            "trainer.4.resume",
            "of these, runs that resume on two ranks with every bit as in the uninterrupted run",
            f"{n} of {n}",
            f"{equal} of {n}",
            "runs",
            equal == n,
            n,
            f"{steps} steps, checkpoints every 3, float32, FSDP2; compared: each rank's slices of parameters and "
            "moments, and torch's generators, after every step",
        ),
    ]


def _strike(place: Path, rank: int, sign: signal.Signals, step: int, steps: int) -> tuple[float, str]:
    """Return the seconds from the signal to the error, and what is wrong with the error, or an empty string."""
    place.mkdir()
    when: list[float] = []

    def strike(pids: Sequence[int]) -> None:
        while int((place / "at").read_text() or 0 if (place / "at").exists() else 0) < step:
            time.sleep(0.005)
        when.append(time.monotonic())
        os.kill(pids[rank], sign)

    def started(pids: Sequence[int]) -> None:
        threading.Thread(target=strike, args=(pids,), daemon=True).start()

    kind = RankDied if sign == signal.SIGKILL else RankSilent
    try:
        run_ranks(steps_with_checkpoints, 2, (str(place), 100 * steps, 3, 0.05), started=started)
    except RankLost as lost:
        seconds = time.monotonic() - when[0]
        right = type(lost) is kind and lost.rank == rank
        return seconds, "" if right else f"{sign.name} to rank {rank} at step {step}: {lost}"
    return float("inf"), f"{sign.name} to rank {rank} at step {step}: the run did not end"


def _same_end(through: Json, resumed: Json, steps: int) -> bool:
    assert isinstance(through, dict) and isinstance(resumed, dict)
    return str(steps) in resumed and resumed.items() <= through.items()


def run(what: str, short: bool, seed: int) -> list[Figure]:
    """Return the figures of one part."""
    if what == "resume":
        return killed_runs(2 if short else 20, 8 if short else 24, seed)
    if what == "checkpoints":
        return (
            random_kills(5, seed) + every_call(("rename", "unlink"))
            if short
            else random_kills(200, seed) + every_call()
        )
    if what == "updates":
        return same_updates(["grpo", "gspo"] if short else [*sorted(PRESETS), "grpo+kl"])
    if what == "ranks":
        return lost_ranks(1, 1, 6, seed) if short else lost_ranks(8, 4, 12, seed)
    return memory_estimates(short)


if __name__ == "__main__":
    parser = command_parser(__doc__, short="run a small part and record nothing")
    parser.add_argument("what", choices=["resume", "checkpoints", "updates", "ranks", "memory"])
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    sys.exit(not report(chosen.short, *run(chosen.what, chosen.short, chosen.seed)))
