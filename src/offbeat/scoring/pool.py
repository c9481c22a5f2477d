"""The scoring pool: reward functions in processes that can be killed, with a hard deadline for each completion.

    with ScoringPool.of(task, workers=4) as pool:
        score = pool.score("The answer is 42.", example.record, of="g7/2")     # a Future[Score | Unscorable]
        scores = pool.score_all([(text, example.record) for text in texts])

Each worker process has a thread, which takes the next completion from the queue, sends it to the process and waits
until the deadline. A process that is late, dead, stopped or out of memory is killed with its children and replaced; its
completion ends as `Unscorable`. One thread holds a completion from the queue to its result, so it ends exactly once.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from offbeat.errors import PoolClosed, PoolError
from offbeat.scoring.process import LONGEST_PAUSE, Grader, WorkerProcesses, setup_message
from offbeat.scoring.tally import FailureLimit, PoolReport, Scored, ScoringTally, TooManyFailures
from offbeat.scoring.worker import ChannelClosed, encode_message
from offbeat.tasks.rewards import Columns, Reward
from offbeat.tasks.task import Task
from offbeat.types import Score, Unscorable

Outcome = Score | Unscorable
Item = TypeVar("Item")

_EXCERPT: Final = 200
_CLOSING_SECONDS: Final = 15.0


class BoundedQueue(Generic[Item]):
    """A first-in, first-out queue for many threads, with a capacity and an end.

    >>> queue = BoundedQueue(capacity=2)
    >>> queue.put("a", seconds=1.0)
    >>> queue.get()
    'a'
    >>> queue.put("b", seconds=1.0)
    >>> queue.end(RuntimeError("stopped"))
    ['b']
    >>> print(queue.get())
    None
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended: Exception | None = None

    def put(self, item: Item, *, seconds: float) -> None:
        """Append an item. `TimeoutError` if the queue stays full; the reason for its end if it has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended or len(self._items) < self.capacity, timeout=seconds):
                raise TimeoutError(f"a queue of {self.capacity} was full for {seconds:g} s")
            if self._ended is not None:
                raise copy(self._ended)  # a copy for each caller: a traceback grows each time it is raised
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item | None:
        """Wait for the next item and return it, or None if the queue has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._items)
            if self._ended is not None:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def end(self, reason: Exception) -> list[Item]:
        """End the queue and return the items left in it. The first reason stays."""
        with self._changed:
            self._ended = self._ended or reason
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    @property
    def ended(self) -> Exception | None:
        """The reason for its end, or None if it has not ended."""
        with self._changed:
            return self._ended


@dataclass
class _Job:
    number: int
    of: str
    excerpt: str
    request: bytes
    result: "Future[Outcome]" = field(default_factory=Future)


class ScoringPool:
    """Worker processes behind a bounded queue. All methods are thread-safe.

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
        evaluation: Grader | None = None,
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
            reward_range: A reward outside it is `Unscorable("invalid")`.
            evaluation: Rewards and range of prompts with the column `FOR_EVALUATION`. Default: the same.
            deadline: Seconds of wall time per completion.
            workers: Number of processes.
            memory_mib: Memory limit of each process.
            waiting: Capacity of the queue; `score` blocks while it is full.
            start_seconds: Time for a process to start and import the reward functions. The pool stops if no worker is
                ready for twice as long.
            limit: Stop the pool if too many completions get no score.
        """
        graders = [(rewards, reward_range), *([evaluation] if evaluation else [])]
        setup = setup_message(graders, memory_mib)
        self._deadline, self._start_seconds = deadline, start_seconds
        self._queue: BoundedQueue[_Job] = BoundedQueue(waiting)
        self._numbers = itertools.count()
        self._tally = ScoringTally(limit or FailureLimit())
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._first_start = threading.Event()
        self._workers = WorkerProcesses(setup, start_seconds, self._closing)
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), name=f"scoring-{slot}", daemon=True)
            for slot in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        if not self._first_start.wait(self._longest_wait(1)):
            self._stop(PoolError(f"waited {self._longest_wait(1):g} s for the first scoring worker to start"))
        if (error := self._queue.ended) is not None:
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
        """Make a pool with the rewards, the range and the deadline of a task, and with those of its evaluation."""
        other = task.evaluation or task
        return cls(
            task.rewards,
            task.reward_range,
            evaluation=(other.rewards, other.reward_range) if other.rewards != task.rewards else None,
            deadline=max(task.deadline, other.deadline),
            workers=workers,
            memory_mib=memory_mib,
            waiting=waiting,
            limit=limit,
        )

    def score(self, text: str, columns: Columns, *, of: str = "") -> "Future[Outcome]":
        """Queue one completion. Blocks while the queue is full; raises if the pool has stopped or is closed.

        Args:
            text: The completion.
            columns: `Example.record`, or the columns of a stored prompt.
            of: A name for reports and errors, for instance the completion's id.
        """
        number = next(self._numbers)
        try:
            request = encode_message({"job": number, "text": text, "columns": dict(columns)})
        except TypeError as error:
            raise TypeError(f"the columns of {of or 'a completion'} must be JSON to reach a worker: {error}") from None
        job = _Job(number, of, text[:_EXCERPT], request)
        # Every completion ahead ends within its deadline plus a restart, so this expires only if something is broken.
        seconds = self._longest_wait(1)
        try:
            self._queue.put(job, seconds=seconds)
        except TimeoutError:
            raise PoolError(f"waited {seconds:g} s for room to score {of or 'a completion'}") from None
        return job.result

    def score_all(self, completions: Iterable[tuple[str, Columns]]) -> list[Outcome]:
        """Score many completions and return the outcomes in the same order."""
        futures = [self.score(text, columns) for text, columns in completions]
        until = time.monotonic() + self._longest_wait(self._queue.capacity)
        return [future.result(timeout=max(0.0, until - time.monotonic())) for future in futures]

    def _longest_wait(self, completions: int) -> float:
        """Return the most seconds that so many completions can take after those the workers hold now."""
        rounds = math.ceil(completions / len(self._threads)) + 1
        return rounds * (self._deadline + 3 * self._start_seconds + LONGEST_PAUSE)

    def report(self) -> PoolReport:
        with self._lock:
            return self._tally.report(self._workers.restarts)

    @property
    def pids(self) -> list[int]:
        return self._workers.pids

    def close(self) -> None:
        """Kill the workers. Completions without a score end with `PoolClosed`."""
        self._closing.set()
        self._stop(PoolClosed("the scoring pool was closed"))
        self._workers.signal_kill()
        for thread in self._threads:
            thread.join(_CLOSING_SECONDS)

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, reason: PoolError) -> None:
        """End the queue; waiting completions end with the reason."""
        for job in self._queue.end(reason):
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(copy(reason))
        self._first_start.set()

    def _serve(self, slot: int) -> None:
        """Run one worker's thread: have a process ready, take a completion, set its result, repeat."""
        try:
            while self._queue.ended is None:
                self._workers.ready(slot)
                self._first_start.set()
                job = self._queue.get()
                if job is not None and job.result.set_running_or_notify_cancel():
                    self._finish(job, slot)
        # The boundary of a thread: an error here stops the pool, so that no caller waits for a dead thread.
        except Exception as error:
            self._stop(error if isinstance(error, PoolError) else PoolError(f"the scoring pool failed: {error!r}"))
        finally:
            self._workers.kill(slot)

    def _finish(self, job: _Job, slot: int) -> None:
        try:
            outcome = self._ask(job, slot)
        # The boundary of a thread: its completion would be lost with it, so the caller gets the error.
        except BaseException as error:
            job.result.set_exception(error)
            raise
        if self._closing.is_set() and isinstance(outcome, Unscorable):
            job.result.set_exception(PoolClosed("the scoring pool was closed"))
        else:
            job.result.set_result(outcome)

    def _ask(self, job: _Job, slot: int) -> Outcome:
        while True:
            process = self._workers.ready(slot)
            asked = time.monotonic()
            try:
                outcome, usable = process.ask(job.number, job.request, seconds=self._deadline)
            except ChannelClosed:  # the process died while idle, so it never received this completion
                self._workers.kill(slot)
                continue
            self._count(Scored(job.of, job.excerpt, time.monotonic() - asked, outcome))
            if not usable:
                self._workers.kill(slot)
            return outcome

    def _count(self, entry: Scored) -> None:
        with self._lock:
            self._tally.add(entry)
            if not self._tally.too_many:
                return
            error = TooManyFailures.of(self._tally)
        self._stop(error)
