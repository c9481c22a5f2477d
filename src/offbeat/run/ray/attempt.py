"""One attempt at a run on Ray: it connects, reserves the GPUs, starts the actors, and ends when one of them is lost.

This module imports Ray: import it only after `entry.environment` has run.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.background import Maintenance
from offbeat.experience.ledger import Ledger
from offbeat.placement.hardware import GIB, Hardware
from offbeat.placement.plan import DevicePlan
from offbeat.run.build import RunContext, make_loop
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory
from offbeat.run.engines import plan_run
from offbeat.run.fleet import Fleet
from offbeat.run.journal import Journal
from offbeat.run.loop import Loop
from offbeat.run.ray import WORKER_SLOT
from offbeat.run.ray.actors import (
    HEARTBEAT_GROUP,
    HEARTBEAT_SECONDS,
    RankActor,
    RemoteScoring,
    ScoringActor,
    WorkerActor,
)
from offbeat.run.ray.driver import ClusterLearner, RemoteMember, keep_pool_alive
from offbeat.types import Json


@dataclass(frozen=True)
class Reservation:
    """The GPUs of a device plan, reserved on the cluster."""

    plan: DevicePlan
    group: PlacementGroup

    @classmethod
    def make(cls, plan: DevicePlan) -> "Reservation":
        """Reserve all GPUs of the plan. Raises `RunError` if they do not become free in time."""
        ranks_per_node = Counter(node for node, _ in plan.ranks)
        bundles = [{"GPU": float(count), "CPU": float(count)} for _, count in sorted(ranks_per_node.items())]
        bundles += [{"GPU": float(len(engine.devices)), "CPU": 1.0} for engine in plan.engines]
        group = placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=WAIT_SECONDS)
        except GetTimeoutError:
            remove_placement_group(group)
            wanted = sum(bundle["GPU"] for bundle in bundles)
            free = ray.available_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
            raise RunError(
                f"waited {WAIT_SECONDS:g} s for the GPUs of this run: {wanted:g} for {len(plan.ranks)} ranks and "
                f"{len(plan.engines)} engines, of which {free:g} are free on the Ray cluster. Stop what uses the "
                "others (`ray status` shows it), or lower trainer.ranks and workers.count"
            ) from None
        return cls(plan, group)

    def for_rank(self, rank: int) -> dict[str, Any]:
        """Return the options of the actor of a rank."""
        nodes = sorted({node for node, _ in self.plan.ranks})
        return {"num_gpus": 1, "scheduling_strategy": self._bundle(nodes.index(self.plan.ranks[rank][0]))}

    def for_engine(self, number: int) -> dict[str, Any]:
        """Return the options of the actor of a worker."""
        nodes = len({node for node, _ in self.plan.ranks})
        gpus = len(self.plan.engines[number].devices)
        return {"num_gpus": gpus, "scheduling_strategy": self._bundle(nodes + number)}

    def release(self) -> None:
        remove_placement_group(self.group)

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, index)


OBJECT_STORE_BYTES: Final = 512 << 20
"""Size of Ray's object store: batches pass through it, and nothing stays."""
LOOPBACK: Final = "127.0.0.1"


@contextlib.contextmanager
def connect(config: Config, directory: RunDirectory) -> Iterator[None]:
    """Connect to the cluster at `cluster.address`, or start one for this run that ends with the block."""
    with contextlib.ExitStack() as own:
        _connect(config, directory, own)
        directory.cluster.touch(0o600)
        directory.cluster.write_text(ray.get_runtime_context().gcs_address + "\n", encoding="utf-8")
        yield


def _connect(config: Config, directory: RunDirectory, own: contextlib.ExitStack) -> None:
    """Connect; `own` disconnects, and removes what is only for this cluster."""
    # Ray starts its processes by fork and exec. Lance's threads survive that, because the exec follows at once.
    warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
    address = config.cluster.address
    own.callback(directory.cluster.unlink, missing_ok=True)
    if address:
        _require_token(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        own.callback(ray.shutdown)
    else:
        actors = config.trainer.ranks + config.workers.count + config.cluster.scoring
        ray.init(
            address="local", num_cpus=max(actors, os.cpu_count() or 1), include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False, logging_level=logging.ERROR,
            _temp_dir=str(own.enter_context(ray_files(directory))),
        )  # fmt: skip
        own.callback(ray.shutdown)  # before its files are removed
        address = ray.get_runtime_context().gcs_address
        if (found := address.split(":")[0]) != LOOPBACK:
            raise RunError(
                f"Ray listens on {found} instead of {LOOPBACK}, because it was imported before offbeat set it up; "
                "import offbeat.run.ray.entry first, or run `offbeat train`"
            )


def _require_token(address: str) -> None:
    if address == "auto":
        address = ray._private.services.canonicalize_bootstrap_address_or_die("auto")
    if query_without_token(address).returncode == 0:
        raise RunError(
            f"the Ray cluster at {address} answers without a token: start its nodes with RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH, or leave cluster.address out and let offbeat start a cluster"
        )


_WITHOUT_TOKEN: Final = """
import sys
import warnings
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", timeout=5)
"""


def query_without_token(address: str) -> subprocess.CompletedProcess[str]:
    """Ask a cluster for its state without a token, in a process of its own; a safe cluster makes that process fail."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", _WITHOUT_TOKEN, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@dataclass
class RunAttempt:
    """One attempt at a run: the actors, and the loop that uses them."""

    config: Config
    directory: RunDirectory
    journal: Journal
    start_step: int = 0
    """The step of the checkpoint that the attempt started from."""
    _learner: ClusterLearner | None = None
    _scoring: list[RemoteScoring] = field(default_factory=list)
    _workers_made: int = 0
    _reserved: Reservation | None = None

    @property
    def step(self) -> int:
        return self._learner.step if self._learner else self.start_step

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        """Start the actors and run the loop; end all actors in any case. Raises `RankLost`."""
        context = RunContext.load(self.config, self.directory)
        context.tokenizer.save_pretrained(self.directory.tokenizer)
        learner = self._start_actors()
        tasks: list[asyncio.Task[None]] = []
        try:
            details = await learner.start()
            self.start_step, self._vocab_size = learner.step, cast(int, details["vocab_size"])
            with context.open_log(self._vocab_size, "driver") as log, Maintenance(log.tables):
                saved = cast(Mapping[str, Json] | None, details["saved"])
                loop = make_loop(context, log, self.journal, learner, self._make_member, learner.evaluate, saved)
                if started is not None:
                    started(loop)
                devices = {"devices": str(self._reserved.plan)} if self._reserved else {}
                estimate = cast(dict[str, Json], details["estimate"])
                self.journal.write(EventKind.ESTIMATED, learner.step, **estimate, **devices)
                tasks = self._watch(loop.fleet)
                return await loop.run()
        finally:
            for task in tasks:
                task.cancel()
            await learner.close()
            for scoring in self._scoring:
                ray.kill(scoring.actor)
            if self._reserved is not None:
                self._reserved.release()

    def _start_actors(self) -> ClusterLearner:
        config = self.config
        plan = plan_run(config, cluster_hardware())
        self._reserved = Reservation.make(plan) if plan else None
        pool = _actor(ScoringActor, max_restarts=-1, max_task_retries=-1)
        self._scoring = [RemoteScoring(pool.remote(config)) for _ in range(config.cluster.scoring)]
        ranks = []
        for i in range(config.trainer.ranks):
            rank = _actor(RankActor, **(self._reserved.for_rank(i) if self._reserved else {}))
            ranks.append(rank.remote(config, self.directory, i, self._scoring[0], plan))
        self._learner = ClusterLearner(ranks, config.run.silence, config.run.patience, self.journal)
        self._learner.watch()
        return self._learner

    def _watch(self, fleet: Fleet) -> list[asyncio.Task[None]]:
        """Start the tasks that restart scoring pools and follow the nodes of the cluster."""
        tasks = []
        for i, scoring in enumerate(self._scoring):
            kept = keep_pool_alive(
                f"scoring pool {i}", scoring.actor, self.config.run.silence, self.journal, lambda: self.step
            )
            tasks.append(asyncio.create_task(kept))
        if self.config.run.mode != "offline":
            tasks.append(asyncio.create_task(self._follow_nodes(fleet)))
        return tasks

    def _make_member(self, name: str, desk: Desk) -> RemoteMember:
        """Start a worker: in its reserved place, or on the node that its name begins with."""
        options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if "/" in name:
            options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(name.split("/")[0], soft=False)}
            options |= {"num_gpus": self.config.engine.tensor_parallel} if self._reserved else {}
        elif self._reserved:
            options = self._reserved.for_engine(int(name.removeprefix("worker ")))
        scoring = self._scoring[self._workers_made % len(self._scoring)]
        self._workers_made += 1
        actor = _actor(WorkerActor, **options).remote(name, self.config, self.directory, self._vocab_size, scoring)
        return RemoteMember(name, actor, desk, self.config.run.silence)

    async def _follow_nodes(self, fleet: Fleet) -> None:
        """Keep one worker for each slot of each live node, as nodes join and leave."""
        present: set[str] = set()
        while True:
            nodes = await asyncio.to_thread(ray.nodes)
            slots = {
                f"{node['NodeID']}/{i}"
                for node in nodes
                if node["Alive"]
                for i in range(int(node["Resources"].get(WORKER_SLOT, 0)))
            }
            for name in sorted(slots - present):
                self.journal.write(EventKind.WORKER_JOINED, self.step, worker=name)
                fleet.join(name)
            for name in sorted(present - slots):
                self.journal.write(EventKind.WORKER_LEFT, self.step, worker=name)
                await fleet.leave(name)
            present = slots
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _actor(part: type, **options: Any) -> Any:
    make: Any = ray.remote
    return make(num_cpus=1, concurrency_groups={HEARTBEAT_GROUP: 1}, **options)(part)


WAIT_SECONDS: Final = 25.0
"""How long a run waits for GPUs that the cluster has, but that something else uses."""


@ray.remote(num_cpus=0)
def _gpu_memory() -> tuple[int, str]:
    """Return the memory of this task's GPU in bytes, 0 if torch sees none, and the node's address."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return memory, ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]


def cluster_hardware() -> Hardware | None:
    """Return the GPUs of the cluster, counted as equal to the smallest; None if no node has one.

    Raises `RunError` if torch does not see a GPU that Ray has, or if none becomes free in time.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]  # type: ignore[no-untyped-call]
    if not nodes:
        return None
    counts = [int(node["Resources"]["GPU"]) for node in nodes]
    asked: Any = _gpu_memory.options(num_gpus=1)
    waiting = asked.remote()
    try:
        memory, address = ray.get(waiting, timeout=WAIT_SECONDS)
    except GetTimeoutError:
        ray.cancel(waiting, force=True)
        raise RunError(
            f"waited {WAIT_SECONDS:g} s for a GPU of the Ray cluster: it has {sum(counts)}, and all are in use. Stop "
            "what uses them (`ray status` shows it), or start nodes with more"
        ) from None
    if not memory:
        raise RunError(
            f"Ray has {counts[0]} GPUs on node {address}, but torch sees none there: install a driver and a torch with "
            "CUDA on that node, or start it without --num-gpus"
        )
    # A node with fewer GPUs than the others limits what can be placed on each.
    return Hardware(len(nodes), min(counts), memory / GIB)


LONGEST: Final = 107 - 66
"""Bytes of a temporary directory below which Ray's sockets have valid paths."""


@contextlib.contextmanager
def ray_files(directory: RunDirectory) -> Iterator[Path]:
    """Return an empty temporary directory for Ray. At the end its sockets are removed, and logs stay."""
    place = directory.ray.resolve()
    shutil.rmtree(place, ignore_errors=True)  # of an earlier process, which may have been killed
    place.mkdir(mode=0o700)
    link = _short_link(place, directory.name) if len(os.fsencode(place)) > LONGEST else None
    try:
        yield link or place
    finally:
        if link is not None:
            link.unlink(missing_ok=True)
        for sockets in place.glob("session_*/sockets"):
            shutil.rmtree(sockets, ignore_errors=True)


def _short_link(place: Path, run: str) -> Path:
    """Link to the directory from the system's temporary one. A link that a killed process left is replaced."""
    folder = Path(tempfile.gettempdir())
    link = folder / f"ob-{run}"
    with contextlib.suppress(OSError):
        if os.readlink(link) == str(place) and link.lstat().st_uid == os.getuid():
            link.unlink()
    for name in (link, *(folder / f"ob-{secrets.token_hex(4)}" for _ in range(8))):  # another user may have the first
        with contextlib.suppress(FileExistsError):
            name.symlink_to(place)
            return name
    raise FileExistsError(17, "no short link can be made", str(folder))
