"""The weight log under broken files, SIGKILL and many readers.

    python -m lab.torture.weights codec               # 1,000 pairs of tensors through the codec
    python -m lab.torture.weights mutants             # 20,000 broken manifests, patches and anchors
    python -m lab.torture.weights kill                # the publisher killed at each of its system calls
    python -m lab.torture.weights fanout              # 32 readers; 200 late joiners and killed readers
    python -m lab.torture.weights mutants --short     # and so on: the short form; nothing is recorded

The parent makes no threads before it has forked its last child.
"""

import argparse
import sys

import torch

from lab.bench.weights_fanout import arrivals, cost
from lab.figures import Figure, record
from lab.torture.weights_codec import codec
from lab.torture.weights_faults import SCENARIOS, every_kill
from lab.torture.weights_mutants import mutants


def run(what: str, short: bool, seed: int) -> list[Figure]:
    """The figures of one part."""
    if what == "codec":
        return codec()
    if what == "mutants":
        return mutants(700 if short else 20_000, seed)
    if what == "kill":
        return every_kill(SCENARIOS[1:2], ("write", "rename")) if short else every_kill()
    if short:
        return cost(rounds=1, versions=6, pace=0.1) + arrivals(8, seed)
    return cost(rounds=4, versions=16, pace=0.5) + arrivals(200, seed)


def shown(*rows: Figure) -> bool:
    """Print what a short form found; it is not recorded."""
    for row in rows:
        print(
            f"{row.id}  {row.what}: {row.measured} {row.unit} (goal {row.goal}), n = {row.n}, short form, not recorded"
        )
        print(f"  {row.note}")
    return all(row.holds for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["codec", "mutants", "kill", "fanout"])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(chosen.what, chosen.short, chosen.seed)
    sys.exit(0 if (shown if chosen.short else record)(*rows) else 1)
