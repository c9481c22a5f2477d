"""One attempt at a run on Ray: actors are made, the loop runs until it ends or a rank is lost, actors end."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.ledger import Ledger
from offbeat.experience.maintenance import Maintenance
from offbeat.run.build import RunContext, load_tokenizer, make_loop, make_task
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory
from offbeat.run.fleet import Fleet
from offbeat.run.journal import Journal
from offbeat.run.loop import Loop
from offbeat.run.ray.actors import BEAT, BEAT_SECONDS, RankActor, RemoteScoring, ScoringActor, WorkerActor
from offbeat.run.ray.driver import ClusterLearner, RemoteMember, keep_alive
from offbeat.run.ray.entry import SLOT
from offbeat.types import Json


@dataclass
class ClusterRun:
    """See the module."""

    config: Config
    directory: RunDirectory
    journal: Journal
    begin: int = 0
    """The step it went on from."""
    _learner: ClusterLearner | None = None
    _scoring: list[RemoteScoring] = field(default_factory=list)
    _made: int = 0

    @property
    def step(self) -> int:
        """How far it is."""
        return self._learner.step if self._learner else self.begin

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        config, silence = self.config, self.config.run.silence
        setting = RunContext(config, self.directory, make_task(config), load_tokenizer(config))
        setting.tokenizer.save_pretrained(self.directory.tokenizer)
        gpus = int(any(node["Resources"].get("GPU") for node in ray.nodes()))  # type: ignore[no-untyped-call]
        pool = _actor(ScoringActor, max_restarts=-1, max_task_retries=-1)
        self._scoring = [RemoteScoring(pool.remote(config)) for _ in range(config.cluster.scoring)]
        rank = _actor(RankActor, num_gpus=gpus)
        ranks = [rank.remote(config, self.directory, i, self._scoring[0]) for i in range(config.trainer.ranks)]
        learner = self._learner = ClusterLearner(ranks, silence, config.run.patience, self.journal)
        learner.watch()
        meeting = self.directory.path.resolve() / f"meet-{uuid.uuid4().hex}"  # one that is there would mislead ranks
        tasks: list[asyncio.Task[None]] = []
        try:
            said = await learner.start(f"file://{meeting}")
            self.begin = learner.step
            self._vocabulary, self._gpus = cast(int, said["vocabulary"]), gpus
            with setting.open_log(self._vocabulary, "driver") as log, Maintenance(log.tables):
                kept = cast(Mapping[str, Json] | None, said["kept"])
                loop = make_loop(setting, log, self.journal, learner, self._member, learner.evaluate, kept)
                if started is not None:
                    started(loop)
                self.journal.write(EventKind.ESTIMATED, learner.step, **cast(dict[str, Json], said["estimate"]))
                tasks = [
                    asyncio.create_task(
                        keep_alive(f"scoring pool {i}", one.actor, silence, self.journal, lambda: learner.step)
                    )
                    for i, one in enumerate(self._scoring)
                ]
                if config.run.mode != "offline":
                    tasks.append(asyncio.create_task(self._follow_nodes(loop.fleet)))
                return await loop.run()
        finally:
            for task in tasks:
                task.cancel()
            await learner.close()
            for one in self._scoring:
                ray.kill(one.actor)
            meeting.unlink(missing_ok=True)

    def _member(self, name: str, desk: Desk) -> RemoteMember:
        """A worker, on the node its name begins with or, if that names none, anywhere."""
        node = name.split("/")[0] if "/" in name else ""
        where: Any = NodeAffinitySchedulingStrategy(node, soft=False) if node else "SPREAD"
        scoring = self._scoring[self._made % len(self._scoring)]
        self._made += 1
        make = _actor(WorkerActor, num_gpus=self._gpus, scheduling_strategy=where)
        actor = make.remote(name, self.config, self.directory, self._vocabulary, scoring)
        return RemoteMember(name, actor, desk, self.config.run.silence)

    async def _follow_nodes(self, fleet: Fleet) -> None:
        """Workers of nodes that come, as many as they have slots; none of nodes that have gone."""
        present: set[str] = set()
        while True:
            nodes = await asyncio.to_thread(ray.nodes)
            slots = {
                f"{node['NodeID']}/{i}"
                for node in nodes
                if node["Alive"]
                for i in range(int(node["Resources"].get(SLOT, 0)))
            }
            for name in sorted(slots - present):
                self.journal.write(EventKind.WORKER_JOINED, self.step, worker=name)
                fleet.join(name)
            for name in sorted(present - slots):
                self.journal.write(EventKind.WORKER_LEFT, self.step, worker=name)
                await fleet.leave(name)
            present = slots
            await asyncio.sleep(BEAT_SECONDS)


def _actor(part: type, **options: Any) -> Any:
    make: Any = ray.remote
    return make(num_cpus=1, concurrency_groups={BEAT: 1}, **options)(part)
