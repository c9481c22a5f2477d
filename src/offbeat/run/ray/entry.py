"""A run on Ray: trainer ranks, workers and scoring pools are actors, the loop stays in this process.

    this process: loop, desk, fleet, journal
        │ asks, and listens for signs of life
        ├── RankActor × trainer.ranks        lost: all ranks end, and the run goes on from its newest checkpoint
        ├── WorkerActor × workers.count      lost: its prompts go back, another takes its place
        │     + those of nodes that join     (`offbeat worker --run RUN` on another machine of the cluster)
        └── ScoringActor × cluster.scoring   lost: restarted, and asked again

Actors belong to this process: when it dies they die, and `offbeat resume` goes on. Nothing passes through Ray that has
to survive; what has is in the two logs and in checkpoints. Ray is imported by `cluster_*.py` only, and only after
`environment` has run: it reads some settings once, when it is imported.
"""

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from offbeat.config import Config
from offbeat.errors import RankLost, RunError
from offbeat.experience.ledger import Ledger
from offbeat.imports import environment_of
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import Journal, last_word
from offbeat.run.loop import Loop
from offbeat.run.sinks import open_journal
from offbeat.types import Json

SLOT: Final = "offbeat_worker"
"""The resource of Ray of which a joining node has one for every worker it is ready to run."""


def train(config: Config, directory: RunDirectory, *, watching: Callable[[Mapping[str, Json]], None] | None = None,
          started: Callable[[Loop], None] | None = None) -> Ledger:  # fmt: skip
    """As `run.local.train`, on Ray."""
    with (
        RunLock(directory),
        open_journal(directory, config.run.sinks, watching) as journal,
        environment(config, directory),
    ):
        from offbeat.run.ray.session import session

        with session(config, directory):
            return asyncio.run(_supervise(config, directory, journal, started))


async def _supervise(config: Config, directory: RunDirectory, journal: Journal,
                     started: Callable[[Loop], None] | None) -> Ledger:  # fmt: skip
    """Go on from the newest checkpoint when a rank is lost, as long as that helps."""
    from offbeat.run.ray.attempt import ClusterRun

    fruitless, last_begin = 0, -1
    attempt = ClusterRun(config, directory, journal)
    with last_word(journal, lambda: attempt.step):
        while True:
            try:
                return await attempt.run(started)
            except RankLost as lost:
                fruitless = 1 if attempt.begin > last_begin else fruitless + 1
                last_begin = attempt.begin
                if fruitless > config.cluster.restarts:
                    raise RunError(
                        f"a rank was lost {fruitless} times in a row without a new checkpoint, the last time: {lost}"
                    ) from lost
            attempt = ClusterRun(config, directory, journal)


def join_command(directory: RunDirectory, slots: int) -> list[str]:
    """What makes this machine a node of a running run's cluster, ready for so many workers; it blocks."""
    try:
        address = directory.cluster.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise RunError(f"{directory.path} does not run on Ray at the moment: there is no {directory.cluster}") from None
    if address.startswith("127."):
        raise RunError(
            f"the Ray cluster of {directory.path} listens on loopback only, so no other machine can join it: start Ray "
            "with a token on the first machine, and give its address as cluster.address (docs/running.md)"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise RunError("set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token")
    resources = json.dumps({SLOT: slots})
    return ["ray", "start", f"--address={address}", f"--num-cpus={slots}", f"--resources={resources}", "--block"]


@contextlib.contextmanager
def environment(config: Config, directory: RunDirectory) -> Iterator[None]:
    """What Ray must find when it is imported: a token, and where to listen."""
    ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    address = config.cluster.address
    if not address:
        ours["RAY_AUTH_TOKEN_PATH"] = str(_token(directory))
        ours["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"  # or Ray's agents outlive a killed driver by a minute
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise RunError(
            f"cluster.address = {address!r}: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token, "
            "here and where its nodes are started; a cluster without a token runs whatever anybody sends it"
        )
    if not address or address.startswith("127."):
        ours["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: listen on loopback only
    with environment_of(ours):
        yield


def _token(directory: RunDirectory) -> Path:
    """Of this run's own cluster; readable by this user alone."""
    path = directory.path / "ray.token"
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
    return path
