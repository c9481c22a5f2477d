"""Kill the Ray node of a worker while the run continues, and let another node join.

    python -m lab.torture.nodes               three rounds, minutes; writes rows run.6.node and run.6.node-joins
    python -m lab.torture.nodes --rounds 1    one round, nothing recorded

The cluster is Ray's own `cluster_utils.Cluster`: a head and a second node on this machine, on loopback, with a token.
The run is `offbeat train` with the address of that cluster. It has one worker, plus one for each slot of other nodes.
"""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.figures import Figure, command_parser, report
from lab.torture.run import KILL_GOAL
from offbeat.types import Json
from tests.fixtures.runs import Events, Run, check_ledger, check_orphans, descendants, scratch, write_config
from tests.fixtures.tiny_model import save_llama


@dataclass(frozen=True)
class Round:
    """Seconds until the loss of a node is reported, and until the worker of a new node is ready."""

    noticed: float
    joined: float
    groups: int


@contextmanager
def cluster(token: Path) -> Iterator[Any]:
    """Start a head node without slots for workers.

    Ray reads its environment when it is imported, and the token once for the whole process.
    """
    if not token.exists():
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )
    from ray.cluster_utils import Cluster

    started: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield started
    finally:
        started.shutdown()


def one_round(model: Path) -> Round:
    with scratch() as directory, cluster(model.parent / "token") as ray_cluster:
        node = ray_cluster.add_node(num_cpus=2, resources={"offbeat_worker": 1})
        run = Run(directory / "run")
        write_config(directory, model, workers=1, address=ray_cluster.address)
        run.start("train", str(directory / "run.toml"), "--out", str(run.directory))
        run.wait_for("two ready workers", lambda events: len(_of(events, "worker ready")) >= 2, 240)
        time.sleep(3)
        raylets = [pid for pid, title in descendants(os.getpid()) if "raylet/raylet" in title]
        pids = [pid for pid, _ in descendants(raylets[-1])] + [raylets[-1]]
        hit = time.time()
        ray_cluster.remove_node(node, allow_graceful=False)
        run.wait_for("report of the loss", lambda events: bool(_since(events, hit, "worker lost", "worker left")), 60)
        noticed = _since(run.events(), hit, "worker lost", "worker left")[0] - hit
        run.wait_for("five steps afterwards", lambda events: len(_since(events, hit + noticed, "step")) >= 5, 60)
        added = time.time()
        ray_cluster.add_node(num_cpus=2, resources={"offbeat_worker": 1})
        run.wait_for("worker on the new node", lambda events: bool(_since(events, added, "worker ready")), 120)
        joined = _since(run.events(), added, "worker ready")[0] - added
        assert run.driver is not None
        pids.append(run.driver.pid)
        run.finish()
        groups = check_ledger(run)
        check_orphans(pids)
    return Round(noticed, joined, groups)


def _of(events: Events, *kinds: str) -> list[dict[str, Json]]:
    return [event for event in events if event["kind"] in kinds]


def _since(events: Events, at: float, *kinds: str) -> list[float]:
    return [when for event in _of(events, *kinds) if (when := float(str(event["at"]))) > at]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="fewer than 3 record nothing")
    rounds = parser.parse_args().rounds
    with scratch() as directory:
        model = directory / "model"
        save_llama(model, tied=False)
        found = []
        for _ in range(rounds):
            found.append(one_round(model))
            print(found[-1], flush=True)
    worst, slowest = max(one.noticed for one in found), max(one.joined for one in found)
    figures = [
        Figure("run.6.node", "seconds until the run reports that the worker of a killed Ray node is lost, the worst",
               f"<= {KILL_GOAL:g}", round(worst, 2), "s", worst <= KILL_GOAL, rounds,
               "the ledger is complete, nothing lost or trained twice, no process left in every round"),
        Figure("run.6.node-joins", "seconds until a worker on a node that was added serves a probed version, the worst",
               "it joins", round(slowest, 1), "s", True, rounds),
    ]  # fmt: skip
    sys.exit(not report(rounds < 3, *figures))


if __name__ == "__main__":
    main()
