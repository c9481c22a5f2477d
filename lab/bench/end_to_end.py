"""Measure a whole step, generation to new weights, against TRL, TorchRL and the limit of the machine.

    python -m lab.bench.end_to_end                      all three shapes: rows throughput.1.* and throughput.4.share-*
    python -m lab.bench.end_to_end 48+32                one shape: tokens of a prompt + tokens of a completion
    python -m lab.bench.end_to_end 48+32 --prompts 4    4 prompts a step instead of 8
    python -m lab.bench.end_to_end 48+32 --sets 2,3     only the second and third set of arms that take turns

Ours generates with vLLM, TRL and TorchRL with transformers; `lab.bench.side_by_side` has TRL with our engine, too.
SmolLM2-135M on two cores, 8 prompts x 8 completions of a forced length a step, all arms in one dtype. Every arm is a
process of its own, and only one computes at a time: a round is one turn of each, the next round takes them in the
opposite order, and a ratio compares two turns of one round. Arms that sync every 10 steps make 5 steps a turn. The
limit is the time of the bare engine for the same tokens plus the matrix products of training at the measured rate. A
quarter of an hour to an hour a shape; the rows of a set of arms are recorded as soon as it is finished. `--short` makes
two rounds of a small batch and records nothing.
"""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from lab.bench import end_to_end_arms, end_to_end_peers
from lab.bench.end_to_end_arms import OURS, PERIOD, Job
from lab.bench.end_to_end_peers import PEERS
from lab.bench.training_arms import DTYPE_NAME
from lab.figures import Figure, command_parser, machine, report
from tests.fixtures.gates import Turn, TurnProcess, Turns
from tests.fixtures.memory import available_bytes
from tests.fixtures.runs import Broken, scratch

SHAPES: Final = ("48+32", "128+128", "32+256")
ROUNDS: Final = 6
"""Counted rounds. Even, so that as many turns with a publish as without one count for v = 10."""
STEPS: Final = {"v10": PERIOD // 2, "concurrent": PERIOD // 2}
"""Steps of a turn, for arms in which one step is not like the next. All others make one."""
ONE_CORE_EACH: Final = {"concurrent"}
"""Arms whose two halves compute at the same time."""
SETS: Final = (("bare", "v1", "trl"), ("v1", "torchrl"), ("v10", "trl"), ("v10", "concurrent"), ("v1", "trl-default"))
"""Arms that take turns with each other; `--sets` counts from 1. Two of ours and two others need more than 24 GiB."""
SET_NUMBERS: Final = {str(number): arms for number, arms in enumerate(SETS, 1)}
GIGABYTES: Final = {"bare": 4, "v1": 8, "v10": 8, "concurrent": 8, "trl-vllm": 7}
"""Memory that an arm needs; any other needs 6."""
ENGINES: Final = end_to_end_arms.ENGINES | end_to_end_peers.ENGINES
"""What an arm is and what generates in it, for the text of a row."""
PATIENCE: Final = 3600.0
SHARE_GOAL: Final = 3
"""Percent of a step that may be spent on sync at v = 1, whatever the shape."""

Results = Mapping[str, Sequence[Turn]]


@dataclass(frozen=True)
class Comparison:
    """A row: the time of one arm over that of another, or over the limit."""

    name: str
    what: str
    over: str
    under: str
    goals: Mapping[str, str]
    """By shape; a shape without a goal is reported."""


def compared(name: str, over: str, under: str, goals: Mapping[str, str]) -> Comparison:
    """Return the comparison of a step of two arms, with what generates in each."""
    return Comparison(name, f"a step of {ENGINES[over]}, over one of {ENGINES[under]}", over, under, goals)


COMPARISONS: Final = (
    Comparison(
        "limit", f"a step of {ENGINES['v1']}, over the limit of the machine", "v1", "limit",
        {"48+32": "<= 1.5", "128+128": "<= 1.5"},
    ),
    compared("trl", "trl", "v1", {"48+32": ">= 3.0", "128+128": ">= 2.5"}),
    compared("trl-v10", "trl", "v10", {"48+32": ">= 3.3"}),
    compared("trl-default", "trl-default", "v1", {}),
    compared("torchrl", "torchrl", "v1", {"48+32": ">= 2.5", "128+128": ">= 2.2"}),
    Comparison(
        "concurrent", "groups a second, concurrent over lockstep, both at v = 10 and generating with vLLM", "v10",
        "concurrent", {"48+32": ">= 1.25"},
    ),
)  # fmt: skip


@contextmanager
def started(job: Job, names: Sequence[str], place: Path) -> Iterator[list[TurnProcess]]:
    """Start the arms one after another, each up to the end of its first step."""
    with ExitStack() as stack:
        arms = []
        for name in names:
            if (free := available_bytes() / 1e9) < GIGABYTES.get(name, 6):
                raise Broken(f"{name} needs {GIGABYTES.get(name, 6)} GB, and {free:.1f} are free; end other programs")
            threads = "1" if name in ONE_CORE_EACH else "2"
            environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
            command = [sys.executable, "-m", "lab.bench.end_to_end", "--arm", name, "--job", str(job), "--pipes"]
            arm = stack.enter_context(TurnProcess(name, command, environment, place / f"{name}.txt"))
            arm.ready(PATIENCE)
            print(f"{name} is ready, {arm.memory() / 1e9:.1f} GB", flush=True)
            arms.append(arm)
        yield arms


def take_turns(arms: Sequence[TurnProcess], rounds: int, steps: Mapping[str, int]) -> dict[str, list[Turn]]:
    """Return the turns of all arms. The first round warms up and does not count; the order reverses every round."""
    results: dict[str, list[Turn]] = {arm.name: [] for arm in arms}
    for number in range(rounds + 1):
        for arm in arms if number % 2 else reversed(arms):
            turn = arm.turn(steps.get(arm.name, 1), PATIENCE)
            print(f"round {number}: {arm.name:<12} {turn.seconds:8.2f} s a step, {by_phase([turn])}", flush=True)
            if number:
                results[arm.name].append(turn)
    for arm in arms:
        print(f"{arm.name} takes {arm.memory() / 1e9:.1f} GB", flush=True)
    return results


def limits(bare: Sequence[Turn], job: Job) -> list[Turn]:
    """Return the limit of each round: generation by the bare engine, and training at the rate of matrix products."""
    parts = [{"generation": one.phases["generation"], "training": job.flops / one.extra["flops"]} for one in bare]
    return [Turn(sum(part.values()), part) for part in parts]


def figures(results: Results, bare: Sequence[Turn], job: Job) -> list[Figure]:
    """Return the rows of one set of arms. `bare` has the rates of the machine; it is empty if no set measured them."""
    found = [figure(one, results, bare, job) for one in COMPARISONS if {one.over, one.under} <= results.keys()]
    if {"limit", "v1"} <= results.keys():  # another set has the arm v1 too, and a row has one origin
        found.append(share_of_sync(results["v1"], job))
    return found


def share_of_sync(turns: Sequence[Turn], job: Job) -> Figure:
    """Return the share of a step in which the trainer probes and publishes, and the engine loads and is probed."""
    shares = [100 * turn.phases["sync"] / turn.seconds for turn in turns]
    goal = f"<= {SHARE_GOAL} %"
    return Figure(
        f"throughput.4.share-{job.lengths.replace('+', '-')}",
        f"share of a step at v = 1 spent on sync, {setting(job)}",
        goal,
        round(median(shares), 2),
        "%",
        median(shares) <= SHARE_GOAL,
        len(shares),
        f"median of {len(shares)} rounds, range {min(shares):.2f} to {max(shares):.2f}; sync is the trainer's probe, "
        f"the publish, the load and the engine's probe, one after the other on the "
        f"cores that also train and generate; v1 {by_phase(turns)}; {machine()}",
    )


def setting(job: Job) -> str:
    """Describe what every arm does, for the text of a row."""
    return f"SmolLM2-135M in {DTYPE_NAME}, {job.groups} x {job.size} completions, {job.lengths} tokens, 2 cores"


def figure(asked: Comparison, results: Results, bare: Sequence[Turn], job: Job) -> Figure:
    over, under = results[asked.over], results[asked.under]
    ratios = [a.seconds / b.seconds for a, b in zip(over, under, strict=True)]
    goal = asked.goals.get(job.lengths, "reported")
    holds = reaches(median(ratios), goal)
    slug = job.lengths.replace("+", "-")
    suffix = "" if (asked.name, job.lengths) == ("concurrent", SHAPES[0]) else f"-{slug}"
    notes = [
        f"median of {len(ratios)} rounds, range {min(ratios):.2f} to {max(ratios):.2f}",
        f"{asked.over} {by_phase(over)}",
        f"{asked.under} {by_phase(under)}",
        *([rates(bare, job)] if bare else []),
        machine(),
    ]
    if asked.under == "concurrent":
        notes.insert(3, f"one thread for each half; lag {middle(under, 'lag'):.1f} at the end of a turn")
    if not holds:
        notes.insert(0, reason(over, under, goal))
        if "limit" in results and "limit" not in (asked.over, asked.under):
            best = median(a.seconds / b.seconds for a, b in zip(over, results["limit"], strict=True))
            notes.insert(1, f"{asked.over} over the limit of the machine itself is {best:.2f}")
    return Figure(
        f"throughput.1.{asked.name}{suffix}",
        f"{asked.what}, {setting(job)}",
        goal,
        round(median(ratios), 2),
        "ratio",
        holds,
        len(ratios),
        "; ".join(notes),
    )


def reaches(value: float, goal: str) -> bool:
    """Return whether a value meets a goal such as `>= 3.0`; what is only reported always does.

    >>> reaches(3.2, ">= 3.0"), reaches(1.6, "<= 1.5"), reaches(9, "reported")
    (True, False, True)
    """
    if goal == "reported":
        return True
    sign, number = goal.split()
    return value >= float(number) if sign == ">=" else value <= float(number)


def seconds_by_phase(turns: Sequence[Turn]) -> dict[str, float]:
    names = dict.fromkeys(name for turn in turns for name in turn.phases)
    return {name: median(turn.phases.get(name, 0.0) for turn in turns) for name in names}


def by_phase(turns: Sequence[Turn]) -> str:
    """Describe a step: its median seconds, in all and by phase."""
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in seconds_by_phase(turns).items() if spent >= 0.005)
    return f"{median(turn.seconds for turn in turns):.2f} s ({parts})"


def reason(over: Sequence[Turn], under: Sequence[Turn], goal: str) -> str:
    """Say which phase keeps a ratio from its goal: the one that loses most seconds against it."""
    needed = float(goal.split()[1])
    above, below = seconds_by_phase(over), seconds_by_phase(under)
    sign = 1 if goal.startswith("<=") else -1
    lost = {
        name: sign * (above.get(name, 0.0) - needed * below.get(name, 0.0)) for name in dict.fromkeys([*above, *below])
    }
    worst = max(lost, key=lambda name: lost[name])
    return (
        f"short mainly because of {worst}: {above.get(worst, 0.0):.2f} s over {below.get(worst, 0.0):.2f} s, for a "
        f"goal of {needed:g}"
    )


def middle(turns: Sequence[Turn], name: str) -> float:
    return median(turn.extra[name] for turn in turns)


def rates(bare: Sequence[Turn], job: Job) -> str:
    """Describe the machine, as measured in the same rounds."""
    tokens = job.tokens / median(turn.phases["generation"] for turn in bare)
    flops, copied = middle(bare, "flops"), middle(bare, "copy")
    return (
        f"bare vLLM {tokens:.0f} tokens/s, {DTYPE_NAME} products {flops / 1e12:.3f} TFLOP/s for "
        f"{job.flops / 1e12:.2f} TFLOP, copies {copied / 1e9:.0f} GB/s"
    )


def measure(job: Job, sets: Sequence[Sequence[str]], *, short: bool) -> bool:
    """Measure one shape, and record the rows of each set when it is finished, unless the run is short."""
    steps = dict.fromkeys(STEPS, 2) if short else STEPS
    bare: list[Turn] = []
    held = []
    for names in sets:
        with scratch() as place, started(job, names, place) as arms:
            results = take_turns(arms, 1 if short else ROUNDS, steps)
        if "bare" in results:
            bare = results["bare"]
            results["limit"] = limits(bare, job)
        held.append(report(short, *figures(results, bare, job)))
    return all(held) or short  # a small batch says nothing about speed


def main() -> bool:
    parser = command_parser(__doc__, short="two rounds of a small batch; record nothing")
    parser.add_argument("shape", nargs="?", choices=SHAPES, help="one shape instead of all")
    parser.add_argument("--arms", help="only the bare engine and these arms, separated by commas; record nothing")
    parser.add_argument("--prompts", type=int, help="prompts of a step; 8 if not given, or 2 with --short")
    parser.add_argument("--sets", default="1,2,3", help="numbers of the sets of arms, separated by commas")
    for name in ("arm", "job", "pipes"):
        parser.add_argument(f"--{name}", help="internal")
    arguments = parser.parse_args()
    known = OURS | PEERS
    if arguments.arm:
        commands, reports = map(int, arguments.pipes.split(","))
        known[arguments.arm](Turns(commands, reports), Job.parse(arguments.job))
        return True
    names = {"bare", *arguments.arms.split(",")} if arguments.arms else known.keys()
    if unknown := names - known.keys():
        parser.error(f"no such arm: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    short = arguments.short or bool(arguments.arms)
    shapes = [arguments.shape] if arguments.shape else ["16+8"] if arguments.short else list(SHAPES)
    default, size = (2, 4) if arguments.short else (8, 8)
    prompts = default if arguments.prompts is None else arguments.prompts
    if prompts < 1:
        parser.error(f"--prompts {prompts}: a step needs at least one prompt")
    jobs = [Job.parse(f"{shape}x{prompts}x{size}") for shape in shapes]
    numbers = set(arguments.sets.split(","))
    if not numbers <= set(SET_NUMBERS):
        parser.error(f"--sets {arguments.sets}: choose among {', '.join(SET_NUMBERS)}, separated by commas")
    chosen_sets = [arms for number, arms in SET_NUMBERS.items() if number in numbers]
    sets = [chosen for arms in chosen_sets if (chosen := [arm for arm in arms if arm in names])]
    held = [measure(job, sets, short=short) for job in jobs]
    return all(held)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a terminated command ends its arms
    sys.exit(not main())
