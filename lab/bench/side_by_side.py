"""Measure a step of ours beside one of TRL and of TorchRL, and one of TRL with our vLLM engine; then training alone.

    python -m lab.bench.side_by_side                          both shapes, all sets of arms: rows door.2.*
    python -m lab.bench.side_by_side 48+32                    tokens of a prompt + tokens of a completion
    python -m lab.bench.side_by_side 48+32 --sets trl,halves  only these sets

SmolLM2-135M on two cores, 8 completions a prompt, all arms in one dtype, with the processes and turns of
`lab.bench.end_to_end`. Ours runs at v = 1 and generates with vLLM. In the set `trl` it takes turns with TRL on the same
vLLM engine through `rollout_func`, so that only the trainers differ, and with TRL that generates with transformers. At
128+128 these three do not fit in 24 GiB; there `same-engine` and `transformers` have one of TRL's arms each. In the set
`torchrl` ours takes turns with TorchRL, which generates with transformers; in the set `halves` the training halves of
ours and of TRL take turns on random completions. The first round warms up; `--rounds` counts the others. On an idle
machine a set takes 4 to 16 minutes with three rounds, and up to 20 GB of memory. `--short` makes one round of a small
batch and records nothing.
"""

import signal
import sys
from collections.abc import Sequence
from statistics import median
from typing import Final

from lab.bench.end_to_end import ENGINES, Results, by_phase, setting, started, take_turns
from lab.bench.end_to_end_arms import Job
from lab.figures import Figure, command_parser, machine, report
from tests.fixtures.gates import Turn
from tests.fixtures.runs import scratch

SHAPES: Final = {"48+32": 4, "128+128": 2}
"""Tokens of a prompt and of a completion, and prompts of a step."""
OURS: Final = "v1"
SETS: Final = {
    "trl": (OURS, "trl-vllm", "trl"),
    "same-engine": (OURS, "trl-vllm"),
    "transformers": (OURS, "trl"),
    "torchrl": (OURS, "torchrl"),
    "halves": ("half", "trl-half"),
}
"""Arms that take turns with each other. All of them together do not fit in 24 GiB."""
SETS_OF: Final = {
    "48+32": ("trl", "torchrl", "halves"),
    "128+128": ("same-engine", "transformers", "torchrl", "halves"),
}
PARTS: Final = ("step", "generation", "training")
SYNC: Final = "sync of v1 is probe, publish to disk, load and probe; of trl-vllm the load alone"


def seconds(turns: Sequence[Turn], part: str) -> list[float]:
    """Return the seconds of a part of each turn, or of the whole step."""
    return [turn.seconds if part == "step" else turn.phases.get(part, 0.0) for turn in turns]


def beside(name: str, results: Results, part: str, job: Job) -> Figure:
    """Return the row with the seconds of one part of a step in every arm of a set."""
    spent = {arm: seconds(turns, part) for arm, turns in results.items()}
    return Figure(
        f"door.2.{part}{'' if name == 'trl' else f'-{name}'}-{slug(job)}",
        f"seconds of {'a step' if part == 'step' else f'{part} in a step'}: "
        f"{'; '.join(ENGINES[arm] for arm in results)}; {setting(job)}",
        "reported",
        " / ".join(f"{median(values):.2f}" for values in spent.values()),
        "s",
        True,
        len(results[OURS]),
        f"medians of rounds; ranges {' / '.join(spread(values) for values in spent.values())}; {machine()}",
    )


def slower(results: Results, over: str, under: str, part: str, row: str, what: str, job: Job) -> Figure:
    """Return the row of a ratio, the median over rounds."""
    pairs = zip(seconds(results[over], part), seconds(results[under], part), strict=True)
    ratios = [one / other for one, other in pairs]
    return Figure(
        f"door.2.{row}-{slug(job)}",
        f"{what}, {setting(job)}",
        "reported",
        round(median(ratios), 2),
        "ratio",
        True,
        len(ratios),
        f"median of {len(ratios)} rounds, range {spread(ratios)}; {over} {by_phase(results[over])}; "
        f"{under} {by_phase(results[under])}; {f'{SYNC}; ' if 'trl-vllm' in results else ''}{machine()}",
    )


def figures(name: str, results: Results, job: Job) -> list[Figure]:
    """Return the rows of a set of arms."""
    if name == "halves":
        what = "the training half of TRL over that of offbeat, on random completions; credit and rewards included"
        return [slower(results, "trl-half", "half", "step", "half", what, job)]
    found = [beside(name, results, part, job) for part in PARTS]
    for peer in SETS[name][1:]:
        what = f"a step of {ENGINES[peer]}, over one of {ENGINES[OURS]}"
        found.append(slower(results, peer, OURS, "step", peer, what, job))
    if "trl-vllm" in results:
        what = "training in a step of TRL over training in one of offbeat, both beside the same vLLM engine"
        found.append(slower(results, "trl-vllm", OURS, "training", "training-ratio", what, job))
    return found


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def slug(job: Job) -> str:
    return job.lengths.replace("+", "-")


def measure(job: Job, sets: Sequence[str], rounds: int, *, short: bool) -> None:
    """Measure one shape, and record the rows of each set of arms when it is finished."""
    for name in sets:
        with scratch() as place, started(job, SETS[name], place) as processes:
            results = take_turns(processes, rounds, {})
        report(short, *figures(name, results, job))


def main() -> None:
    parser = command_parser(__doc__, short="one round of a small batch; record nothing")
    parser.add_argument("shape", nargs="?", choices=SHAPES, help="one shape instead of both")
    parser.add_argument("--sets", help="sets of arms, separated by commas, instead of those of each shape")
    parser.add_argument("--prompts", type=int, help="prompts of a step; 4 or 2 if not given")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    arguments = parser.parse_args()
    asked = arguments.sets.split(",") if arguments.sets else ()
    if unknown := set(asked) - SETS.keys():
        parser.error(f"--sets {arguments.sets}: no {', '.join(sorted(unknown))}; choose among {', '.join(SETS)}")
    if arguments.short:
        measure(Job.parse(f"16+8x{arguments.prompts or 2}x4"), asked or SETS_OF["48+32"], 1, short=True)
        return
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        job = Job.parse(f"{shape}x{arguments.prompts or SHAPES[shape]}x8")
        measure(job, asked or SETS_OF[shape], arguments.rounds, short=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a terminated command ends its arms
    main()
