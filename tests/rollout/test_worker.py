"""The worker makes groups of prompts even if engines fail; no group of an unverified version reaches the log."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offbeat.errors import AdapterMismatch, ProbeFailed, WorkerFailed
from offbeat.experience.ledger import Fate
from offbeat.experience.log import ExperienceLog
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.prompt_leases import EvaluationSampling, LocalPrompts, PromptLease, PromptLeases
from offbeat.rollout.worker import Pace, Status, Worker
from offbeat.tasks.rewards import Answers
from offbeat.types import Completion, Group, Prompt, Score, Unscorable
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.probe import Probe
from tests.fixtures.simulation.scripted_engine import ScriptedEngine, bigrams, scripted_probe

VOCABULARY = 16
SEQUENCES = ((1, 2, 3, 4, 5, 6), (7, 6, 5))
QUICK = Pace(lanes=2, groups_per_call=2, poll_seconds=0.005, call_seconds=5, start_seconds=5)


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), float(version))}


@dataclass
class Policies:
    """A weight log in memory."""

    published: list[int] = field(default_factory=lambda: [0])
    rebuilt: list[int] = field(default_factory=list)
    spec: AdapterSpec | None = None

    def newest(self) -> int | None:
        return max(self.published, default=None)

    def fetch(self, version: int, *, from_anchor: bool = False) -> dict[str, torch.Tensor]:
        if from_anchor:
            self.rebuilt.append(version)
        return weights(version)

    def adapter(self, version: int) -> AdapterSpec | None:
        return self.spec

    def probe(self, version: int) -> Probe | None:
        return scripted_probe(weights(version).items(), VOCABULARY, SEQUENCES)


class Graders:
    """Long completions are right; empty ones cannot be scored."""

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Score | Unscorable]]":
        done: Future[list[Score | Unscorable]] = Future()
        done.set_result(
            [
                Score(float(len(text) > 4)) if text else Unscorable("invalid", "nothing written")
                for text in answers.texts
            ]
        )
        return done


@dataclass
class Setup:
    """A worker and its parts."""

    log: ExperienceLog
    engines: Iterator[ScriptedEngine]
    policies: Policies = field(default_factory=Policies)
    pace: Pace = QUICK
    lease_seconds: float = 60.0
    adapter: AdapterSpec | None = None

    def __post_init__(self) -> None:
        self.leases = PromptLeases(
            lambda i: Prompt(f"p{i}", [i % VOCABULARY], "t"), name="r", seed=0, seconds=self.lease_seconds
        )
        self.prompts = LocalPrompts(self.leases)
        decode = lambda ids: "".join(chr(97 + token) for token in ids if token != 1)  # noqa: E731
        maker = GroupMaker(4, Sampling(8, (1,)), decode, Graders())
        self.worker = Worker("w", self.engine, self.policies, self.prompts, maker, self.log, self.pace, self.adapter)

    async def engine(self) -> Engine:
        return next(self.engines)

    async def work_until(self, *enough: Callable[[], bool], publishing: tuple[int, ...] = ()) -> None:
        """Run the worker until the last condition holds. After each earlier condition, publish a version."""
        running = asyncio.create_task(self.worker.run())
        async with asyncio.timeout(60):
            for condition, version in itertools.zip_longest(enough, publishing):
                while not condition() and not running.done():
                    await asyncio.sleep(0.01)
                if version is not None:
                    self.policies.published.append(version)
        self.worker.stop()
        await running

    def has(self, version: int) -> Callable[[], bool]:
        return lambda: version in self.versions()

    def versions(self) -> list[int | None]:
        return [group.oldest_version for group in self.log.groups()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    with ExperienceLog.open(tmp_path / "log") as opened:
        yield opened


def healthy(**options: object) -> ScriptedEngine:
    return ScriptedEngine(VOCABULARY, weights(0).items(), **options)  # type: ignore[arg-type]


def slow(seconds: float) -> Callable[[Request], Awaitable[None]]:
    return lambda request: asyncio.sleep(seconds)


def test_prompts_become_scored_groups_each_once(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy(takes=slow(0.001))))
    asyncio.run(setup.work_until(lambda: setup.worker.tally.groups >= 12))
    groups = list(log.groups())
    ids = {group.id for group in groups}
    assert len(ids) == len(groups) >= 12 and ids >= {f"r-{i}" for i in range(8)}
    assert all(len(group.completions) == 4 and group.scored for group in groups)
    assert setup.worker.status is Status.STOPPED and not setup.leases.out


def test_a_completion_that_cannot_be_scored_stays_in_its_group(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy()))
    asyncio.run(setup.work_until(lambda: setup.worker.tally.groups >= 40))
    kinds = {type(one.score) for group in log.groups() for one in group.completions}
    assert kinds == {Score, Unscorable}


def test_stopping_gives_prompts_back_and_the_ledger_balances(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy(takes=slow(30))))
    asyncio.run(setup.work_until(lambda: len(setup.leases.out) == 4))
    assert not setup.leases.out
    assert {lease.group_id for lease in setup.leases.take(4, 0.0, "next", 0)} == {"r-0", "r-1", "r-2", "r-3"}
    ledger = log.ledger()
    ledger.check()
    assert ledger.counts == {Fate.UNFINISHED: 4}


def test_a_newer_version_is_loaded_and_recorded_in_groups(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy(takes=slow(0.002))))

    asyncio.run(setup.work_until(setup.has(0), setup.has(1), setup.has(5), publishing=(1, 5)))
    assert setup.worker.tally.loads == 3 and set(setup.versions()) == {0, 1, 5}


def test_a_dead_engine_is_replaced_and_its_prompts_are_answered(log: ExperienceLog) -> None:
    engines = [healthy(dies_at=3, takes=slow(0.002)), healthy(takes=slow(0.002))]
    setup = Setup(log, iter(engines), Policies([0, 3]))
    asyncio.run(setup.work_until(lambda: setup.worker.tally.groups >= 20))
    assert setup.worker.tally.starts == 2 and "the script ended it" in setup.worker.tally.notices[0]
    assert {group.id for group in log.groups()} >= {f"r-{i}" for i in range(12)}
    assert set(setup.versions()) == {3}  # the second engine also generated nothing before its load
    assert engines[1].loads == [3]


def test_engines_that_die_repeatedly_end_the_worker(log: ExperienceLog) -> None:
    setup = Setup(log, (healthy(dies_at=0) for _ in itertools.count()))
    with pytest.raises(WorkerFailed, match="3 engines in a row died without a finished group"):
        asyncio.run(setup.work_until(lambda: False))
    assert not setup.leases.out and setup.worker.tally.starts == 3


def test_a_completion_ten_times_slower_than_its_lease_loses_no_engine_and_is_generated_once(log: ExperienceLog) -> None:
    calls: Counter[str] = Counter()

    async def takes(request: Request) -> None:
        calls[request.id] += 1
        await asyncio.sleep(8.0 if request.id == "r-0" else 0.01)

    setup = Setup(log, iter([healthy(takes=takes)]), pace=Pace(lanes=2, poll_seconds=0.05), lease_seconds=0.8)
    asyncio.run(setup.work_until(lambda: any(group.id == "r-0" for group in log.groups())))
    assert setup.worker.tally.starts == 1 and calls["r-0"] == 1 and not setup.worker.tally.notices
    order = [group.id for group in log.groups()]
    assert order.index("r-0") > 10, "other groups flow meanwhile"


def test_a_completion_that_hangs_in_an_engine_that_answers_is_cancelled_and_the_engine_is_kept(
    log: ExperienceLog,
) -> None:
    hangs = iter([60.0])
    engine = healthy(takes=lambda request: asyncio.sleep(next(hangs, 0.0) if request.id == "r-0" else 0.0))
    setup = Setup(log, iter([engine]), pace=Pace(poll_seconds=0.005, call_seconds=2))
    asyncio.run(setup.work_until(lambda: any(group.id == "r-0" for group in log.groups())))
    [notice] = setup.worker.tally.notices
    assert "waited 2 s for r-0 on worker w" in notice and "the engine answers and is kept" in notice
    assert setup.worker.tally.starts == 1
    log.ledger().check()


class Silent(ScriptedEngine):
    """Does not answer for half a second after a generate call begins, which never ends."""

    quiet_until = 0.0

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        self.quiet_until = time.monotonic() + 0.5
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def health(self) -> None:
        await asyncio.sleep(max(0.0, self.quiet_until - time.monotonic()))


def test_a_worker_whose_engine_does_not_answer_renews_nothing_and_says_so(log: ExperienceLog) -> None:
    engine = Silent(VOCABULARY, weights(0).items())
    setup = Setup(log, iter([engine]), pace=Pace(poll_seconds=0.02), lease_seconds=0.1)
    taken: list[str] = []

    def expired() -> bool:
        if not taken and setup.leases.expire(time.monotonic()):
            taken.extend(lease.group_id for lease in setup.leases.take(1, time.monotonic() + 60, "other", 0))
        return bool(setup.worker.tally.notices)

    asyncio.run(setup.work_until(expired))
    assert taken == ["r-0"]
    assert setup.worker.tally.notices == ["leases expired while the worker was silent: r-0"]


def test_evaluation_prompts_are_answered_at_their_temperature_and_leave_nothing_in_the_log(log: ExperienceLog) -> None:
    seen: list[Request] = []

    async def takes(request: Request) -> None:
        seen.append(request)

    setup = Setup(log, iter([healthy(takes=takes)]))
    lease = PromptLease("evaluation-0-0", Prompt("p", [3], "t"), 7, evaluation=EvaluationSampling(2, 0.5))
    answers: list[Group] = []

    async def evaluated(groups: Sequence[Group]) -> None:
        answers.extend(groups)

    async def go() -> None:
        setup.prompts.evaluated = evaluated  # type: ignore[method-assign]
        await setup.worker.start()
        await setup.worker.rollout([lease])

    asyncio.run(go())
    [request], [group] = seen, answers
    assert (request.size, request.sampling.temperature, request.seed) == (2, 0.5, 7)
    assert group.scored and not list(log.groups()) and log.ledger().generated == 0
    assert (setup.worker.tally.groups, setup.worker.tally.evaluated) == (0, 1)


def test_an_engine_that_ignores_loads_is_quarantined_and_then_ends_the_worker(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy(deaf=True, takes=slow(0.002))))
    with pytest.raises(ProbeFailed, match="does not serve version 1, even after a reload from an anchor"):
        asyncio.run(setup.work_until(setup.has(0), lambda: False, publishing=(1,)))
    assert setup.policies.rebuilt == [1] and setup.worker.tally.quarantines == 1
    assert set(setup.versions()) == {0}  # groups labeled version 1 never reached the log
    assert not setup.leases.out
    log.ledger().check()


class DeafOnce(ScriptedEngine):
    """The first load of version 1 does nothing, the second works."""

    async def load(self, version: int, weights: object) -> None:
        self._deaf = version == 1 and 1 not in self.loads
        await super().load(version, weights)  # type: ignore[arg-type]


def test_a_reload_from_an_anchor_ends_the_quarantine_and_unverified_groups_are_discarded(log: ExperienceLog) -> None:
    engine = DeafOnce(VOCABULARY, weights(0).items(), takes=slow(0.003))
    setup = Setup(log, itertools.repeat(engine))
    asyncio.run(setup.work_until(setup.has(0), setup.has(1), publishing=(1,)))
    assert setup.policies.rebuilt == [1] and setup.worker.tally.quarantines == 1 and engine.loads == [0, 1, 1]
    tables = [bigrams(weights(version).items(), VOCABULARY) for version in (0, 1)]
    for group in log.groups():
        table = tables[group.oldest_version or 0]
        for one in group.completions:
            path = [int(group.prompt.token_ids[-1]), *one.token_ids.tolist()]
            np.testing.assert_allclose(one.behavior_logprobs, table[path[:-1], path[1:]], atol=1e-5)
    log.ledger().check()


def test_without_weights_the_worker_reports_what_it_waited_for(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(healthy()), Policies([]), Pace(poll_seconds=0.005, start_seconds=0.05))
    with pytest.raises(
        WorkerFailed, match=r"waited 0.05 s for the first weights for worker w: check that a trainer publishes"
    ):
        asyncio.run(setup.work_until(lambda: False))


def test_the_wrong_model_is_refused_before_it_generates_anything(log: ExperienceLog) -> None:
    setup = Setup(log, itertools.repeat(ScriptedEngine(VOCABULARY, weights(9).items())))
    with pytest.raises(ProbeFailed, match="not the one this run started from"):
        asyncio.run(setup.work_until(lambda: False))
    assert not list(log.groups())


def test_while_a_version_is_checked_beside_the_others_groups_of_the_previous_one_go_on(log: ExperienceLog) -> None:
    checked_after = 0

    class SlowProbe(ScriptedEngine):
        """Answers a probe after 8 more groups."""

        async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
            nonlocal checked_after
            if self.loads and self.loads[-1] == 1:
                before = setup.worker.tally.groups
                while setup.worker.tally.groups < before + 8:
                    await asyncio.sleep(0.001)
                assert setup.worker.version == 0 and setup.worker.status is Status.READY
                assert setup.worker.tally.discarded == 0
                checked_after = len(list(log.groups()))
            return await super().logprobs(sequences)

    engine = SlowProbe(VOCABULARY, weights(0).items(), takes=slow(0.002), holds_several=True)
    setup = Setup(log, iter([engine]))
    asyncio.run(setup.work_until(setup.has(0), setup.has(1), publishing=(1,)))
    versions = setup.versions()
    assert set(versions[:checked_after]) == {0} and checked_after >= 8 and 1 in versions
    assert not setup.worker.tally.notices
    log.ledger().check()


def test_a_version_that_fails_its_probe_beside_the_others_never_generates_and_costs_no_group(
    log: ExperienceLog,
) -> None:
    engine = DeafOnce(VOCABULARY, weights(0).items(), takes=slow(0.003), holds_several=True)
    setup = Setup(log, iter([engine]))
    asyncio.run(setup.work_until(setup.has(0), setup.has(1), publishing=(1,)))
    assert setup.policies.rebuilt == [1] and setup.worker.tally.quarantines == 1 and engine.loads == [0, 1, 1]
    assert "version 1 failed its probe" in setup.worker.tally.notices[0]
    tables = [bigrams(weights(version).items(), VOCABULARY) for version in (0, 1)]
    for group in log.groups():
        for one in group.completions:
            path = [int(group.prompt.token_ids[-1]), *one.token_ids.tolist()]
            expected = tables[group.oldest_version or 0][path[:-1], path[1:]]
            np.testing.assert_allclose(one.behavior_logprobs, expected, atol=1e-5)
    log.ledger().check()


SPEC = AdapterSpec(rank=8, alpha=16.0, targets=("q_proj",), base="1f" * 32)


@pytest.mark.parametrize(
    ("published", "own", "sentence"),
    [
        (SPEC, replace(SPEC, base="2e" * 32), "Give the directory that the run started from"),
        (SPEC, replace(SPEC, alpha=32.0), "alpha 16, targets q_proj, but this worker is set to rank 8, alpha 32"),
        (SPEC, None, "start it with the .adapter. section of the run's configuration"),
        (None, SPEC, "start it without the .adapter. section"),
    ],
    ids=["another base", "another scale", "full weights", "not an adapter run"],
)
def test_a_worker_whose_engine_cannot_serve_the_run_is_refused(
    log: ExperienceLog, published: AdapterSpec | None, own: AdapterSpec | None, sentence: str
) -> None:
    setup = Setup(log, iter([healthy()]), Policies(spec=published), adapter=own)
    with pytest.raises(AdapterMismatch, match=sentence):
        asyncio.run(setup.work_until(lambda: False))
    assert not list(log.groups())


def test_a_worker_with_the_adapter_of_the_run_works(log: ExperienceLog) -> None:
    setup = Setup(log, iter([healthy(holds_several=True)]), Policies(spec=SPEC), adapter=SPEC)
    asyncio.run(setup.work_until(lambda: setup.worker.tally.groups >= 4))
    assert set(setup.versions()) == {0}
