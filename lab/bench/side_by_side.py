"""Measure a step of ours beside one of TRL and of TorchRL, and one of TRL with our vLLM engine; then training alone.

    python -m lab.bench.side_by_side 48+32 --prompts 4      tokens of a prompt + tokens of a completion, prompts a step
    python -m lab.bench.side_by_side 128+128 --prompts 2

SmolLM2-135M on two cores, 8 completions a prompt, all arms in one dtype, the processes and turns of
`lab.bench.end_to_end`. Four arms take turns with whole steps: ours at v = 1, which generates with vLLM; TRL with the
same vLLM engine through its `rollout_func`, so that only the trainers differ; TRL and TorchRL as they are, which
generate with transformers. Then the training halves of ours and of TRL take turns on random completions. The first
round warms up; `--rounds` counts the others. Ten to fifteen minutes a shape with three rounds, and 20 GB of memory.
Rows door.2.*. `--short` makes one round of a small batch and records nothing.
"""

import signal
import sys
from collections.abc import Sequence
from statistics import median
from typing import Final

from lab.bench.end_to_end import ENGINES, Results, by_phase, setting, started, take_turns
from lab.bench.end_to_end_arms import Job
from lab.figures import Figure, command_parser, machine, report
from lab.fixtures.gates import Turn
from lab.fixtures.runs import scratch

SHAPES: Final = ("48+32", "128+128")
OURS: Final = "v1"
WHOLE: Final = (OURS, "trl-vllm", "trl", "torchrl")
HALVES: Final = ("half", "trl-half")
PARTS: Final = ("step", "generation", "training")


def seconds(turns: Sequence[Turn], part: str) -> list[float]:
    """Return the seconds of a part of each turn, or of the whole step."""
    return [turn.seconds if part == "step" else turn.phases.get(part, 0.0) for turn in turns]


def beside(results: Results, part: str, job: Job) -> Figure:
    """Return the row with the seconds of one part of a step in every arm."""
    spent = {name: seconds(results[name], part) for name in WHOLE}
    return Figure(
        f"door.2.{part}-{slug(job)}",
        f"seconds of {'a step' if part == 'step' else f'{part} in a step'}: "
        f"{'; '.join(ENGINES[name] for name in WHOLE)}; {setting(job)}",
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
        f"{under} {by_phase(results[under])}; {machine()}",
    )


def figures(results: Results, job: Job) -> list[Figure]:
    """Return the rows of the arms that took turns with whole steps.

    `sync` of ours is the trainer's probe, the publish to disk, the load and the engine's probe. Of TRL with our engine
    it is the load alone.
    """
    peers = [name for name in WHOLE if name != OURS]
    return [
        *(beside(results, part, job) for part in PARTS),
        *(
            slower(results, name, OURS, "step", name, f"a step of {ENGINES[name]}, over one of {ENGINES[OURS]}", job)
            for name in peers
        ),
        slower(
            results, "trl-vllm", OURS, "training", "training-ratio",
            "training in a step of TRL over training in one of offbeat, both beside the same vLLM engine", job,
        ),
    ]  # fmt: skip


def halves(results: Results, job: Job) -> list[Figure]:
    """Return the row of the training halves alone."""
    what = "the training half of TRL over that of offbeat, on random completions; credit and rewards included"
    return [slower(results, "trl-half", "half", "step", "half", what, job)]


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def slug(job: Job) -> str:
    return job.lengths.replace("+", "-")


def measure(job: Job, rounds: int, *, short: bool) -> None:
    """Measure one shape, and record the rows of each set of arms when it is finished."""
    for arms, rows in ((WHOLE, figures), (HALVES, halves)):
        with scratch() as place, started(job, arms, place) as processes:
            results = take_turns(processes, rounds, {})
        report(short, *rows(results, job))


def main() -> None:
    parser = command_parser(__doc__, short="one round of a small batch; record nothing")
    parser.add_argument("shape", nargs="?", choices=SHAPES, help="one shape instead of both")
    parser.add_argument("--prompts", type=int, help="prompts of a step; 4 or 2 if not given")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    arguments = parser.parse_args()
    if arguments.short:
        measure(Job.parse(f"16+8x{arguments.prompts or 2}x4"), 1, short=True)
        return
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        prompts = arguments.prompts or {"48+32": 4, "128+128": 2}[shape]
        measure(Job.parse(f"{shape}x{prompts}x8"), arguments.rounds, short=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a terminated command ends its arms
    main()
