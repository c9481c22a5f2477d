"""Train the runs of one verdict again, and compare.

    python -m lab.learning.evidence.repeat evidence.d.sums.replay-final           10 minutes on two cores
    python -m lab.learning.evidence.repeat evidence.d.sums.replay-final --minutes 30 --jobs 8
    python -m lab.learning.evidence.repeat --list                                 the verdicts there are

Seed by seed, both arms of the verdict are trained at their own learning rates until the time is up. On the same
processor and libraries each curve equals the kept one; another processor rounds differently, and then only the verdict
can agree. Nothing is kept.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lab.figures import command_parser
from lab.learning.evidence.block_claims import CLAIMS
from lab.learning.evidence.blocks import BLOCKS, Block
from lab.learning.evidence.claims import Cells, Verdict, judge
from lab.learning.evidence.rows import EvidenceRow, Key
from lab.learning.evidence.sweep import name_of, train, training_pool


def verdicts() -> Iterator[tuple[Block, Verdict]]:
    """Yield the verdicts of the finished blocks."""
    for name, claims in CLAIMS.items():
        block, done = BLOCKS[name], BLOCKS[name].done()
        if not block.count_missing(done):
            yield from ((block, verdict) for verdict in judge(list(claims(Cells(block, done)))))


def repeat(block: Block, kept: Verdict, minutes: float, jobs: int) -> bool:
    """Train until the time is up. Return True if all curves are the kept ones, or else if the verdict is the same."""
    arms, done = kept.claim.paired.arms, block.done()
    rates = {arm: block.best_rate(arm, done) for arm in arms}
    cells = [(arm, rates[arm], seed) for seed in range(1, block.seeds + 1) for arm in arms]
    now: dict[Key, EvidenceRow] = {}
    equal = 0
    with training_pool(jobs) as pool:
        for row in train(block, cells, done, pool, jobs, time.monotonic() + 60 * minutes):
            key = row["arm"], row["rate"], row["seed"]
            now[key] = row
            same = row["curve"] == done[key]["curve"]
            equal += same
            print(f"{name_of(row)}: {'the same' if same else 'another'} curve", flush=True)
    print(f"{equal} of {len(now)} curves are the kept ones; the verdict has {len(cells)}")
    seeds = [seed for seed in range(1, block.seeds + 1) if all((arm, rates[arm], seed) in now for arm in arms)]
    if len(seeds) < 2:
        return equal == len(now)
    verdict = _of_seeds(kept, Cells(block, done | now), seeds)
    print(f"now   {verdict.word}: {verdict.numbers}, n = {len(seeds)}")
    print(f"kept  {kept.word}: {kept.numbers}, n = {block.seeds}")
    return equal == len(now) or verdict.word == kept.word


def _of_seeds(kept: Verdict, cells: Cells, seeds: Sequence[int]) -> Verdict:
    """Return the verdict of these cells by these seeds alone."""
    claim = next(one for one in CLAIMS[cells.block.name](cells) if one.id == kept.claim.id)
    values = [claim.values[seed - 1] for seed in seeds]
    return replace(claim, paired=replace(claim.paired, values=values)).judge(kept.level)


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("row", nargs="?", help="id of a verdict")
    parser.add_argument("--list", action="store_true", help="print the verdicts there are")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no new run after this many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="how many runs train at the same time")
    options = parser.parse_args()
    found = {verdict.claim.id: (block, verdict) for block, verdict in verdicts()}
    if options.list or options.row not in found:
        known = "\n".join(found) or "no block is finished"
        print(known if options.list else f"{options.row!r} is not a verdict; choose one of:\n{known}")
        return bool(options.list)
    return repeat(*found[options.row], options.minutes, options.jobs)


if __name__ == "__main__":
    sys.exit(not main())
