"""A worker on a second Ray node: the node is killed while the run goes on, and another one joins.

    python -m lab.torture.nodes               rows run.6.node*
    python -m lab.torture.nodes --rounds 1    one round, nothing recorded

The cluster is Ray's own `cluster_utils.Cluster`: a head and a second node on this machine, on loopback, with a token.
The run is `offbeat train` with that cluster's address, one worker of its own, and those of nodes that bring slots.
"""

import argparse
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.figures import Figure, record
from lab.fixtures.tiny_model import save_llama
from lab.torture.run import KILL_GOAL, Run, check_books, check_orphans, descendants, place, write_config
from offbeat.types import Json


@dataclass(frozen=True)
class Round:
    """Seconds after a node was killed, or another one came."""

    noticed: float
    joined: float
    groups: int


@contextmanager
def cluster(token: Path) -> Iterator[Any]:
    """A head without slots. Ray reads its environment when it is imported."""
    if not token.exists():  # Ray reads it once for the whole process
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )
    from ray.cluster_utils import Cluster

    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def one_round(model: Path) -> Round:
    with place() as directory, cluster(model.parent / "token") as ours:
        node = ours.add_node(num_cpus=2, resources={"offbeat_worker": 1})
        run = Run(directory / "run")
        write_config(directory, model, workers=1, address=ours.address)
        run.start("train", str(directory / "run.toml"), "--out", str(run.directory))
        run.wait_for("both workers", lambda events: len(_of(events, "worker ready")) >= 2, 240)
        time.sleep(3)
        raylets = [pid for pid, title in descendants(os.getpid()) if "raylet/raylet" in title]
        everybody = [pid for pid, _ in descendants(raylets[-1])] + [raylets[-1]]
        hit = time.time()
        ours.remove_node(node, allow_graceful=False)
        run.wait_for("word of it", lambda events: bool(_since(events, hit, "worker lost", "worker left")), 60)
        noticed = _since(run.events(), hit, "worker lost", "worker left")[0] - hit
        run.wait_for("steps afterwards", lambda events: len(_since(events, hit + noticed, "step")) >= 5, 60)
        came = time.time()
        ours.add_node(num_cpus=2, resources={"offbeat_worker": 1})
        run.wait_for("the new node's worker", lambda events: bool(_since(events, came, "worker ready")), 120)
        joined = _since(run.events(), came, "worker ready")[0] - came
        assert run.driver is not None
        everybody.append(run.driver.pid)
        run.finish()
        groups = check_books(run)
        check_orphans(everybody)
    return Round(noticed, joined, groups)


def _of(events: Sequence[dict[str, Json]], *kinds: str) -> list[dict[str, Json]]:
    return [event for event in events if event["kind"] in kinds]


def _since(events: Sequence[dict[str, Json]], at: float, *kinds: str) -> list[float]:
    return [when for event in _of(events, *kinds) if (when := float(str(event["at"]))) > at]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    rounds = options.parse_args().rounds
    with place() as directory:
        model = directory / "model"
        save_llama(model, tied=False)
        found = []
        for _ in range(rounds):
            found.append(one_round(model))
            print(found[-1], flush=True)
    worst, slowest = max(one.noticed for one in found), max(one.joined for one in found)
    figures = [
        Figure("run.6.node", "seconds until the run says that a killed Ray node's worker is lost, the worst",
               f"<= {KILL_GOAL:g}", round(worst, 2), "s", worst <= KILL_GOAL, rounds,
               "books balance, nothing lost or trained twice, no process left in every round"),
        Figure("run.6.node-joins", "seconds until a worker on a node that was added serves a proven version, the worst",
               "it joins", round(slowest, 1), "s", True, rounds),
    ]  # fmt: skip
    if rounds >= 3:
        record(*figures)
    else:
        print(*figures, sep="\n")


if __name__ == "__main__":
    main()
