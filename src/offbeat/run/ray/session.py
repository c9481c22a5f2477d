"""A connection to Ray: to a cluster of this run's own, which ends with it, or to one that is there."""

import contextlib
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Final

import ray

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.run.directory import RunDirectory

OBJECTS: Final = 512 << 20
"""Bytes of Ray's object store: a batch passes through it, and nothing stays."""
LOOPBACK: Final = "127.0.0.1"


@contextlib.contextmanager
def session(config: Config, directory: RunDirectory) -> Iterator[None]:
    """Ray, as long as the block runs."""
    # Ray starts its processes by fork and exec, which Lance's threads survive: the exec follows at once.
    warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
    address = config.cluster.address
    if address:
        _refuse_open(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        actors = config.trainer.ranks + config.workers.count + config.cluster.scoring
        ray.init(
            address="local", num_cpus=max(actors, os.cpu_count() or 1), include_dashboard=False,
            object_store_memory=OBJECTS, log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
        address = ray.get_runtime_context().gcs_address
        if (found := address.split(":")[0]) != LOOPBACK:
            ray.shutdown()
            raise RunError(
                f"Ray listens on {found} instead of {LOOPBACK}: it was imported before offbeat could set it up; import "
                "offbeat.run.ray.entry first, or run `offbeat train`"
            )
    directory.cluster.write_text(ray.get_runtime_context().gcs_address + "\n", encoding="utf-8")
    try:
        yield
    finally:
        directory.cluster.unlink(missing_ok=True)
        ray.shutdown()


_WITHOUT_TOKEN: Final = """
import sys
import warnings
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", timeout=5)
"""


def asked_without_token(address: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a stranger, in a process of his own, who asks the cluster for its state."""
    stranger = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", _WITHOUT_TOKEN, address]
    return subprocess.run(command, env=stranger, capture_output=True, text=True, timeout=60, check=False)


def _refuse_open(address: str) -> None:
    """A cluster that answers somebody without a token."""
    if address == "auto":
        address = ray._private.services.canonicalize_bootstrap_address_or_die("auto")
    if asked_without_token(address).returncode == 0:
        raise RunError(
            f"the Ray cluster at {address} answers without a token: start its nodes with RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH, or leave cluster.address out to have one started"
        )
