"""A run on Ray: trainer ranks, workers and scoring pools are actors; the loop stays in this process, the driver.

    driver: loop, desk, fleet, journal
        │ calls, and waits for heartbeats
        ├── RankActor × trainer.ranks        lost: all ranks end, and the run resumes from its newest checkpoint
        ├── WorkerActor × workers.count      lost: its prompts go back, and another worker takes its place
        │     + those of nodes that join     (`offbeat worker --run RUN` on another machine of the cluster)
        └── ScoringActor × cluster.scoring   lost: restarted, and its calls are repeated

The actors belong to the driver: if it dies, they die too, and `offbeat resume` continues the run. Everything that must
survive is in the two logs and in checkpoints; nothing of it passes through Ray.

This module imports Ray only inside functions, after `environment` has run: Ray reads some settings once, at import.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from offbeat.config import Config
from offbeat.errors import RankLost, RunError
from offbeat.experience.ledger import Ledger
from offbeat.imports import temporary_environment
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.event_loop import run_coroutine
from offbeat.run.journal import Journal, record_failure
from offbeat.run.loop import Loop
from offbeat.run.ray import WORKER_SLOT
from offbeat.run.sinks import open_journal
from offbeat.trainer.allocator import share_freed_memory
from offbeat.types import Json


def train(config: Config, directory: RunDirectory, *, watching: Callable[[Mapping[str, Json]], None] | None = None,
          started: Callable[[Loop], None] | None = None, lock: RunLock | None = None) -> Ledger:  # fmt: skip
    """Train on Ray, with the arguments of `offbeat.run.local.train`."""
    share_freed_memory()
    with (
        lock or RunLock(directory),
        open_journal(directory, config.run.sinks, watching) as journal,
        environment(config, directory),
    ):
        from offbeat.run.ray.attempt import connect

        with connect(config, directory):
            return run_coroutine(_supervise(config, directory, journal, started))


async def _supervise(config: Config, directory: RunDirectory, journal: Journal,
                     started: Callable[[Loop], None] | None) -> Ledger:  # fmt: skip
    """Resume from the newest checkpoint when a rank is lost, at most `cluster.restarts` times without a new one."""
    from offbeat.run.ray.attempt import RunAttempt

    failures, last_start = 0, -1
    attempt = RunAttempt(config, directory, journal)
    with record_failure(journal, lambda: attempt.step):
        while True:
            try:
                return await attempt.run(started)
            except RankLost as lost:
                failures = 1 if attempt.start_step > last_start else failures + 1
                last_start = attempt.start_step
                if failures > config.cluster.restarts:
                    raise RunError(
                        f"a rank was lost {failures} times in a row without a new checkpoint (cluster.restarts = "
                        f"{config.cluster.restarts}); the last time: {lost}. Fix the cause, then `offbeat resume`"
                    ) from lost
            attempt = RunAttempt(config, directory, journal)


def join_command(directory: RunDirectory, slots: int) -> list[str]:
    """Return the command that makes this machine a node of a run's cluster, with `slots` workers. It blocks."""
    try:
        address = directory.cluster.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise RunError(f"{directory.path} does not run on Ray now: there is no {directory.cluster}") from None
    if address.startswith("127."):
        raise RunError(
            f"the Ray cluster of {directory.path} listens on loopback only, so no other machine can join it. Start Ray "
            "with a token on the first machine, and set cluster.address to its address (see docs/how-to/cluster.md)"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise RunError("no token is set: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token")
    resources = json.dumps({WORKER_SLOT: slots})
    return ["ray", "start", f"--address={address}", f"--num-cpus={slots}", f"--resources={resources}", "--block"]


@contextlib.contextmanager
def environment(config: Config, directory: RunDirectory) -> Iterator[None]:
    """Set what Ray reads when it is imported: the token, and where to listen."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
    address = config.cluster.address
    if not address:
        variables["RAY_AUTH_TOKEN_PATH"] = str(_token_file(directory))
        # Without this, Ray's agents outlive a killed driver by a minute.
        variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise RunError(
            f"cluster.address = {address!r}: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the cluster's token, "
            "here and where its nodes are started. A cluster without a token runs any code that it is sent"
        )
    if not address or address.startswith("127."):
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: listen on loopback only
    with temporary_environment(variables):
        yield


def _token_file(directory: RunDirectory) -> Path:
    """Return the file with the token of the run's own cluster; only this user can read it."""
    path = directory.path / "ray.token"
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
    path.chmod(0o600)  # also one that was copied
    return path
