"""The scoring pool: reward functions in processes that can be killed, each completion with a hard deadline.

    with ScoringPool.of(task, workers=4) as pool:
        score = pool.score("The answer is 42.", example.record, of="g7/2")     # a Future[Score | Unscorable]
        scores = pool.score_all([(text, example.record) for text in texts])

A thread per worker takes the next completion, asks its process, and waits until the deadline. A process that is late,
dead, stopped or out of memory is killed with all it started, and a fresh one takes its place; the completion it had
ends as `Unscorable`. Each completion is held by one thread from the line to its result, so it ends exactly once.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from offbeat.errors import PoolClosed, PoolError, RewardDoesNotImport, WorkerDoesNotStart
from offbeat.scoring.channel import ChannelClosed, encoded
from offbeat.scoring.line import Line
from offbeat.scoring.process import Recipe, WorkerProcess
from offbeat.scoring.tally import FailureLimit, PoolReport, Scored, ScoringTally
from offbeat.tasks.rewards import Columns, Reward
from offbeat.tasks.task import Task
from offbeat.types import Score, Unscorable

Outcome = Score | Unscorable

_EXCERPT: Final = 200
_IMPORTS: Final = 3
"""Attempts of one worker to import the reward functions before the pool gives up."""
_SHORTEST_START: Final = 2.0
"""Seconds that every start is allowed."""
_LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts to start a worker, at most."""
_CLOSING_SECONDS: Final = 15.0


class TooManyFailures(PoolError):
    """More completions than allowed got no score: the scoring is broken, not the answers."""

    examples: tuple[Scored, ...] = ()

    @classmethod
    def of(cls, tally: ScoringTally) -> "TooManyFailures":
        """With the last that failed."""
        examples = tally.report().failing
        shown = "\n".join(f"  {entry}" for entry in examples[-5:])
        error = cls(
            f"{tally.failure_share:.1%} of the last completions (at most {tally.limit.window}) could not be scored, "
            f"and {tally.limit.share:.1%} are allowed; the last of them:\n{shown}\n"
            "mend the reward function, or raise the deadline or the limit"
        )
        error.examples = examples
        return error


@dataclass
class _Job:
    number: int
    of: str
    excerpt: str
    request: bytes
    result: "Future[Outcome]" = field(default_factory=Future)


class ScoringPool:
    """Worker processes behind a bounded line. Safe to use from many threads.

    >>> from offbeat.tasks.arithmetic import arithmetic
    >>> with ScoringPool.of(arithmetic(), workers=1) as pool:
    ...     pool.score("42", {"answer": "42"}).result(timeout=30)
    Score(reward=1.0, breakdown={'correct': 1.0})
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        reward_range: tuple[float, float] = (0.0, 1.0),
        *,
        deadline: float = 5.0,
        workers: int = 2,
        memory_mib: int = 2048,
        waiting: int = 256,
        start_seconds: float = 60.0,
        limit: FailureLimit | None = None,
    ) -> None:
        """Start the workers and wait for the first, so that a reward function that does not import fails here.

        Args:
            rewards: Functions that another process can import.
            reward_range: Outside it a reward is `Unscorable("invalid")`.
            deadline: Seconds of wall time per completion.
            workers: Processes.
            memory_mib: Cap for each process.
            waiting: Completions that may wait; `score` blocks while as many do.
            start_seconds: For a process to start and import the reward functions. Twice as long without a single
                worker that is ready, and the pool gives up.
            limit: When to stop because too many completions get no score.
        """
        self._recipe = Recipe.of(rewards, reward_range, memory_mib)
        self._deadline, self._start_seconds = deadline, start_seconds
        self._line: Line[_Job] = Line(waiting)
        self._numbers = itertools.count()
        self._tally = ScoringTally(limit or FailureLimit())
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._first_start = threading.Event()
        self._last_ready = time.monotonic()
        self._slowest_start = 0.0
        self._processes: dict[int, WorkerProcess] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"scoring-{slot}", daemon=True)
            for slot in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        if not self._first_start.wait(self._patience(1)):
            self._give_up(PoolError(f"waited {self._patience(1):g} s for the first scoring worker to start"))
        if (error := self._line.ended) is not None:
            self.close()
            raise error

    @classmethod
    def of(
        cls,
        task: Task,
        *,
        workers: int = 2,
        memory_mib: int = 2048,
        waiting: int = 256,
        limit: FailureLimit | None = None,
    ) -> "ScoringPool":
        """A pool for a task, with the task's own range and deadline."""
        return cls(
            task.rewards,
            task.reward_range,
            deadline=task.deadline,
            workers=workers,
            memory_mib=memory_mib,
            waiting=waiting,
            limit=limit,
        )

    def score(self, text: str, columns: Columns, *, of: str = "") -> "Future[Outcome]":
        """One completion. Blocks while the line is full; raises where the pool has given up or is closed.

        Args:
            text: What was generated.
            columns: `Example.record`, or the columns of a stored prompt.
            of: What to call it in lists and errors, for instance the completion's id.
        """
        number = next(self._numbers)
        try:
            request = encoded({"job": number, "text": text, "columns": dict(columns)})
        except TypeError as error:
            raise TypeError(f"the columns of {of or 'a completion'} must be JSON to reach a worker: {error}") from None
        job = _Job(number, of, text[:_EXCERPT], request)
        # Every completion ahead ends within its deadline and a restart: this expires only where something is broken.
        seconds = self._patience(1)
        try:
            self._line.put(job, seconds=seconds)
        except TimeoutError:
            raise PoolError(f"waited {seconds:g} s for room to score {of or 'a completion'}") from None
        return job.result

    def score_all(self, completions: Iterable[tuple[str, Columns]]) -> list[Outcome]:
        """Many completions, results in their order."""
        futures = [self.score(text, columns) for text, columns in completions]
        until = time.monotonic() + self._patience(self._line.room)
        return [future.result(timeout=max(0.0, until - time.monotonic())) for future in futures]

    def _patience(self, completions: int) -> float:
        """How long that many completions can take at worst, on top of those with the workers."""
        rounds = math.ceil(completions / len(self._threads)) + 1
        return rounds * (self._deadline + 3 * self._start_seconds + _LONGEST_PAUSE)

    def report(self) -> PoolReport:
        """Counts, the slowest and the failing."""
        with self._lock:
            return self._tally.report()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._lock:
            return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """End the workers. What has no score yet ends with `PoolClosed`."""
        self._closing.set()
        self._give_up(PoolClosed("the scoring pool was closed"))
        with self._lock:
            for process in self._processes.values():
                process.signal_kill()
        for thread in self._threads:
            thread.join(_CLOSING_SECONDS)

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up(self, why: PoolError) -> None:
        """Take no more; what waits ends with the reason."""
        for job in self._line.end(why):
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(copy(why))
        self._first_start.set()

    def _serve(self, slot: int) -> None:
        """One worker's thread: a process that stands ready, a completion, its result, and again."""
        try:
            while self._line.ended is None:
                self._stand_ready(slot)
                self._first_start.set()
                job = self._line.take()
                if job is not None and job.result.set_running_or_notify_cancel():
                    self._settle(job, slot)
        # The boundary of a thread: what ends it ends the pool, so that nobody waits for a thread that is gone.
        except Exception as error:
            self._give_up(error if isinstance(error, PoolError) else PoolError(f"scoring broke down: {error!r}"))
        finally:
            self._dismiss(slot)

    def _stand_ready(self, slot: int) -> WorkerProcess:
        """This slot's process, a fresh one where there is none or it has died."""
        process = self._processes.get(slot)
        if process is not None and process.alive:
            return process
        attempt = 0
        while True:
            self._dismiss(slot)
            attempt += 1
            began = time.monotonic()
            try:
                fresh = WorkerProcess()
                with self._lock:
                    self._processes[slot] = fresh
                if self._closing.is_set():  # `close` may have looked for processes just before
                    raise PoolClosed("the scoring pool was closed")
                fresh.prepare(self._recipe, seconds=self._start_allowance(attempt))
            except (WorkerDoesNotStart, OSError) as error:
                self._consider(error, attempt)
            else:
                self._last_ready = time.monotonic()
                self._slowest_start = max(self._slowest_start, self._last_ready - began)
                return fresh

    def _start_allowance(self, attempt: int) -> float:
        """Seconds for a start: a few times what starts have taken, so that a stuck one is not waited for for long."""
        if not self._slowest_start:
            return self._start_seconds
        usual = max(_SHORTEST_START, 4 * self._slowest_start)
        return min(self._start_seconds, usual * 2.0 ** (attempt - 1))

    def _consider(self, error: Exception, attempt: int) -> None:
        """After a failed start: pause, or give up where trying again is of no use."""
        if isinstance(error, RewardDoesNotImport) and attempt >= _IMPORTS:
            raise PoolError(f"{error} ({attempt} attempts)") from error
        if (idle := time.monotonic() - self._last_ready) > 2 * self._start_seconds:
            raise PoolError(f"no scoring worker has been ready for {idle:.0f} s; the last: {error}") from error
        if self._closing.wait(min(0.2 * 2**attempt, _LONGEST_PAUSE)):
            raise PoolClosed("the scoring pool was closed")

    def _dismiss(self, slot: int) -> None:
        with self._lock:
            process = self._processes.pop(slot, None)
            self._tally.restarts += process is not None and not self._closing.is_set()
        if process is not None:
            process.kill()

    def _settle(self, job: _Job, slot: int) -> None:
        try:
            outcome = self._ask(job, slot)
        # The boundary of a thread: a completion it holds would be lost with it, so it gets whatever went wrong.
        except BaseException as error:
            job.result.set_exception(error)
            raise
        if self._closing.is_set() and isinstance(outcome, Unscorable):
            job.result.set_exception(PoolClosed("the scoring pool was closed"))
        else:
            job.result.set_result(outcome)

    def _ask(self, job: _Job, slot: int) -> Outcome:
        while True:
            process = self._stand_ready(slot)
            asked = time.monotonic()
            try:
                outcome, usable = process.ask(job.number, job.request, seconds=self._deadline)
            except ChannelClosed:  # it had died idle: this completion never reached it
                self._dismiss(slot)
                continue
            self._note(Scored(job.of, job.excerpt, time.monotonic() - asked, outcome))
            if not usable:
                self._dismiss(slot)
            return outcome

    def _note(self, entry: Scored) -> None:
        with self._lock:
            self._tally.add(entry)
            if not self._tally.too_many:
                return
            error = TooManyFailures.of(self._tally)
        self._give_up(error)
