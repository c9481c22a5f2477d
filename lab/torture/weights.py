"""Test the weight log with broken files, SIGKILL and many readers.

    python -m lab.torture.weights codec      1,000 pairs of tensors through the codec: row weights-rollout.1.codec
    python -m lab.torture.weights mutants    20,000 broken manifests, patches and anchors: row
                                             weights-rollout.1.mutants
    python -m lab.torture.weights kill       kill the publisher at each of its system calls: rows weights-rollout.7.*
    python -m lab.torture.weights fanout     32 readers; 200 late joiners and killed readers: rows weights-rollout.6.*

Minutes each. `--short` runs a small part and records nothing. The parent starts no threads before it has forked its
last child.
"""

import sys

import torch

from lab.bench.weights_fanout import arrivals, cost
from lab.figures import Figure, command_parser, report
from lab.torture.weights_codec import codec
from lab.torture.weights_faults import SCENARIOS, every_kill
from lab.torture.weights_mutants import mutants


def run(what: str, short: bool, seed: int) -> list[Figure]:
    """Return the figures of one part."""
    if what == "codec":
        return codec()
    if what == "mutants":
        return mutants(700 if short else 20_000, seed)
    if what == "kill":
        # A short run has no scenario with retention, so it shows the first figure only.
        return every_kill(SCENARIOS[1:2], ("write", "rename"))[:1] if short else every_kill()
    if short:  # the calls of a publish do not depend on the load of the machine, its times do
        return cost(rounds=1, versions=8, pace=0.1)[:1] + arrivals(8, seed)
    return cost(rounds=4, versions=16, pace=0.5) + arrivals(200, seed)


if __name__ == "__main__":
    parser = command_parser(__doc__, short="run a small part and record nothing")
    parser.add_argument("what", choices=["codec", "mutants", "kill", "fanout"])
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    sys.exit(not report(chosen.short, *run(chosen.what, chosen.short, chosen.seed)))
