"""Supervised training on another model's right answers by `offbeat train`, then RL: does it help like a library's?

    python -m lab.learning.supervised_first              five seeds, 10 minutes; row door.5.supervised
    python -m lab.learning.supervised_first --seeds 1    one seed, nothing recorded

The answers, the sums and the run after them are those of block e of `lab/learning/protocol.md`, and so are the kept
runs with which it is compared. Only the supervised training differs: an offline run of recipe `supervised-first`, then
`offbeat export`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Final

from lab.figures import Figure, command_parser, record, show
from lab.learning.evidence.blocks import ALONE, BLOCKS, SUPERVISED
from lab.learning.evidence.cells import run_from
from lab.learning.evidence.others import answers
from lab.learning.evidence.rows import EvidenceRow, final, rows
from lab.learning.model import SUMS, directory
from lab.learning.statistics import Interval
from offbeat.cli.init import recipes
from offbeat.experience.log import ExperienceLog
from tests.fixtures.processes import OFFBEAT

SEEDS: Final = (1, 2, 3, 4, 5)
PROMPTS: Final = 12
"""Groups of eight in a batch of supervised training: about as many right answers as in block e, 64."""
BLOCK: Final = BLOCKS["e-sums"]


def imitate(seed: int, rate: float, place: Path) -> Path:
    """Write the other model's groups to a log, train on it once and return the exported model."""
    with ExperienceLog.open(place / "experience") as log:
        log.append([group for groups in answers(seed).values() for group in groups])
    (place / "run.toml").write_text(recipes()["supervised-first"], encoding="utf-8")
    task = Path(__file__).parent / "task.py"
    settings = {
        "seed": seed, "model.path": directory(SUMS), "model.compute": "float32", "model.serve": "float32",
        "task.name": task, "run.experience": place / "experience", "prompts_per_step": PROMPTS,
        "optimizer.learning_rate": rate, "sampling.max_tokens": 4, "engine.max_prompt_tokens": 16,
        "trainer.token_budget": 2048, "trainer.save_every": 10_000,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    _offbeat("train", place / "run.toml", "--out", place / "run", *words)
    _offbeat("export", place / "run", place / "model", "--dtype", "float32")
    return place / "model"


def _offbeat(*words: object) -> None:
    done = subprocess.run([OFFBEAT, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"offbeat {words[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def run(seed: int) -> EvidenceRow:
    """Train one seed: supervised first, then as in block e."""
    arm = BLOCK.arm(SUPERVISED)
    rate = BLOCK.best_rate(SUPERVISED, rows(BLOCK.name))
    with tempfile.TemporaryDirectory(prefix="offbeat-lab-") as scratch:
        return run_from(imitate(seed, rate, Path(scratch)), BLOCK.task, arm, rate, seed)


def _figure(done: list[EvidenceRow]) -> Figure:
    """Compare with the kept runs of the same seeds: fresh groups alone, and after supervised training elsewhere."""
    kept = rows(BLOCK.name)
    finals = [final(row) for row in done]
    others = {}
    for name in (ALONE, SUPERVISED):
        rate = BLOCK.best_rate(name, kept)
        others[name] = [final(kept[name, rate, row["seed"]]) for row in done]
    apart = Interval.of([one - other for one, other in zip(finals, others[ALONE], strict=True)])
    elsewhere = Interval.of([one - other for one, other in zip(finals, others[SUPERVISED], strict=True)])
    return Figure(
        "door.5.supervised",
        "offline run with preset imitate on another model's answers, then 400 fresh groups: final minus these alone",
        "interval above 0",
        str(apart),
        "",
        apart.low > 0,
        len(done),
        f"final {Interval.of(finals)}, from {fmean(row['curve'][0] for row in done):.3f} after the offline run; minus "
        f"supervised training outside of offbeat {elsewhere}; paired by seed",
    )


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many; fewer than five record nothing")
    seeds = SEEDS[: parser.parse_args().seeds]
    done = []
    for seed in seeds:
        done.append(run(seed))
        print(f"seed {seed}: from {done[-1]['curve'][0]:.3f} to {final(done[-1]):.3f}", flush=True)
    return record(_figure(done)) if len(seeds) == len(SEEDS) else show(_figure(done))


if __name__ == "__main__":
    sys.exit(not main())
