"""The scoring pool: reward functions in processes that can be killed, with a hard deadline for each completion.

    with ScoringPool.of(task, workers=4) as pool:
        score = pool.score("The answer is 42.", example.record, of="g7/2")     # a Future[Score | Unscorable]
        group = pool.score_group(Answers(texts, example.record))                       # a Future of a list of them

Each worker process has a thread, which takes the next completion from the queue, sends it to the process and waits
until the deadline. A process that is late, dead, stopped or out of memory is killed with its children and replaced.
One thread holds a completion from the queue to its result, so it ends exactly once.

If scoring fails, the pool finds out who caused it: `blame.py` has the rule. If the worker had too little CPU, the
completion is asked again, one at a time, and then the machine is to blame.

A reward function with TRL's arguments gets all completions of a prompt in one call. If that fails, each completion is
scored alone, to find those that cause it; the others are scored again together, without them.

A value that can be no reward, or is outside the task's range, ends the pool with `InvalidReward` if an empty answer or
one that is known to be right has such a value as well.
"""

import itertools
import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeGuard, TypeVar

from offbeat.errors import InvalidReward, PoolClosed, PoolError
from offbeat.scoring import blame
from offbeat.scoring.process import LONGEST_PAUSE, Grader, Reply, WorkerProcesses, longest_wait, setup_message
from offbeat.scoring.tally import (
    FailureLimit,
    PoolReport,
    Scored,
    ScoringTally,
    TooManyFailures,
    caused_by_answer,
)
from offbeat.scoring.worker import ChannelClosed, encode_message
from offbeat.tasks.rewards import FOR_EVALUATION, AnswerFault, Answers, Columns, Reward, fault_reward
from offbeat.tasks.task import Task
from offbeat.types import BY_ANSWER, FAULT, ON_RIGHT, Json, Score, Unscorable

Item = TypeVar("Item")


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


Outcome = Score | Unscorable
_Ending = tuple[Outcome, str, bool]
"""What a completion gets, the error behind it if its scoring failed, and whether the grader caused it."""

_EXCERPT: Final = 200
_LONGEST_CONTROL: Final = 10_000
"""Characters of a text that can serve as a control."""
_CONTROLS: Final = 3
"""The latest answers, and the references of a prompt, that can serve as controls."""
_BEST: Final = 4096
"""Prompts whose best answer is kept."""
_ASKS: Final = blame.PATIENCE + 8
"""How often one completion can take a worker's whole time: its trial, and what is asked before and after it."""
_LEFT_OUT: Final = 64
"""How many ways to leave one or two answers out of a group are tried."""
_CLOSING_SECONDS: Final = 15.0


@dataclass
class _Job:
    """Completions of one prompt that a worker scores in one call: usually one."""

    number: int
    of: Sequence[str]
    answers: Answers
    request: bytes
    results: "list[Future[Outcome]]"
    cpu: float = 0.0


def _side(columns: Columns) -> int:
    """Return 0 for a completion of training, 1 for one of evaluation."""
    return int(bool(columns.get(FOR_EVALUATION)))


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
        answer_fault: AnswerFault = "floor",
        evaluation_fault: AnswerFault | None = None,
        deadline: float = 5.0,
        workers: int = 2,
        memory_mib: int = 2048,
        waiting: int = 256,
        start_seconds: float = 60.0,
        limit: FailureLimit | None = None,
        steps: int = 0,
    ) -> None:
        """Start the workers and wait for the first, so that a reward function that does not import fails here.

        Args:
            rewards: Functions that another process can import.
            reward_range: A reward outside it ends the pool.
            evaluation: Rewards and range of prompts with the column `FOR_EVALUATION`. Default: the same.
            answer_fault: What an answer gets that makes the scoring fail; see `Task.answer_fault`.
            evaluation_fault: The same for evaluation. Default: the same.
            deadline: Seconds per completion: wall time, without the time in which the worker and its children waited
                for a CPU.
            workers: Number of processes.
            memory_mib: Memory limit of each process.
            waiting: Capacity of the queue; `score` blocks while it is full.
            start_seconds: Time for a process to start and import the reward functions. The pool stops if no worker is
                ready for twice as long.
            limit: Stop the pool if too many completions get no score.
            steps: The last step of the run, which TRL functions see.
        """
        graders = [(rewards, reward_range), *([evaluation] if evaluation else [])]
        setup = setup_message(graders, memory_mib)
        faults = (answer_fault, answer_fault if evaluation_fault is None else evaluation_fault)
        ranges = (graders[0][1], graders[-1][1])
        self._fault_rewards = [fault_reward(fault, range_) for fault, range_ in zip(faults, ranges, strict=True)]
        self._at_once = [any(reward.trl for reward in graders[side][0]) for side in (0, -1)]
        self._steps, self._largest = steps, 1
        self._lowest = [math.inf, math.inf]
        self._highest = [-math.inf, -math.inf]
        self._latest = [deque[str](maxlen=_CONTROLS), deque[str](maxlen=_CONTROLS)]
        self._best: dict[int, tuple[float, str]] = {}
        self._share = blame.FailureShare()
        self._down: dict[str, float] = {}
        self._turn = threading.Lock()
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
        steps: int = 0,
    ) -> "ScoringPool":
        """Make a pool with the rewards, the range and the deadline of a task, and with those of its evaluation."""
        other = task.evaluation or task
        return cls(
            task.rewards,
            task.reward_range,
            evaluation=(other.rewards, other.reward_range) if other.rewards != task.rewards else None,
            answer_fault=task.answer_fault,
            evaluation_fault=other.answer_fault,
            deadline=max(task.deadline, other.deadline),
            workers=workers,
            memory_mib=memory_mib,
            waiting=waiting,
            limit=limit,
            steps=steps,
        )

    def score(self, text: str, columns: Columns, *, of: str = "") -> "Future[Outcome]":
        """Queue one completion. Blocks while the queue is full; raises if the pool has stopped or is closed.

        Args:
            text: The completion.
            columns: `Example.record`, or the columns of a stored prompt.
            of: A name for reports and errors, for instance the completion's id.
        """
        [result] = self._submit(Answers([text], columns), [of])
        return result

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Outcome]]":
        """Queue completions of one prompt, in one call for reward functions that compare them. Blocks like `score`."""
        names = of or [""] * len(answers.texts)
        if self._at_once[_side(answers.columns)]:
            return _together(self._submit(answers, names))
        return _together(
            [self.score(one, answers.columns, of=of) for one, of in zip(answers.texts, names, strict=True)]
        )

    def _submit(self, answers: Answers, of: Sequence[str]) -> "list[Future[Outcome]]":
        name = of[0] or "a completion"
        try:
            job = self._job(answers, of)
        except TypeError as error:
            raise TypeError(f"the columns of {name} must be JSON to reach a worker: {error}") from None
        self._largest = max(self._largest, len(of))
        # Every completion ahead ends within its deadline plus a restart, so this expires only if something is broken.
        seconds = self._longest_wait(1)
        try:
            self._queue.put(job, seconds=seconds)
        except TimeoutError:
            raise PoolError(f"waited {seconds:g} s for room to score {name}") from None
        return job.results

    def _job(self, answers: Answers, of: Sequence[str]) -> _Job:
        number = next(self._numbers)
        columns, tokens = dict(answers.columns), answers.token_ids
        described: dict[str, Json] = {
            "texts": [*answers.texts], "columns": columns, "step": answers.step, "steps": self._steps,
            "token_ids": None if tokens is None else [[*map(int, one)] for one in tokens],
        }  # fmt: skip
        request = encode_message({"job": number, "answers": described})
        return _Job(number, of, answers, request, [Future() for _ in of])

    def score_all(self, completions: Iterable[tuple[str, Columns]]) -> list[Outcome]:
        """Score many completions and return the outcomes in the same order."""
        futures = [self.score(text, columns) for text, columns in completions]
        until = time.monotonic() + self._longest_wait(self._queue.capacity)
        return [future.result(timeout=max(0.0, until - time.monotonic())) for future in futures]

    def _longest_wait(self, completions: int) -> float:
        """Return the most seconds that so many completions can take after those the workers hold now."""
        rounds = math.ceil(completions / len(self._threads)) + 1
        once = longest_wait(self._deadline * self._largest) + 3 * self._start_seconds + LONGEST_PAUSE
        return rounds * _ASKS * (self._largest + (self._largest > 1)) * once

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
            for result in job.results:
                if result.set_running_or_notify_cancel():
                    result.set_exception(copy(reason))
        self._first_start.set()

    def _serve(self, slot: int) -> None:
        """Run one worker's thread: have a process ready, take a completion, set its result, repeat."""
        try:
            while self._queue.ended is None:
                self._workers.ready(slot)
                self._first_start.set()
                job = self._queue.get()
                if job is not None and sum(one.set_running_or_notify_cancel() for one in job.results):
                    self._finish(job, slot)
        # The boundary of a thread: an error here stops the pool, so that no caller waits for a dead thread.
        except Exception as error:
            self._stop(error if isinstance(error, PoolError) else PoolError(f"the scoring pool failed: {error!r}"))
        finally:
            self._workers.kill(slot)

    def _finish(self, job: _Job, slot: int) -> None:
        running = [result for result in job.results if not result.cancelled()]
        asked = time.monotonic()
        try:
            endings = self._ask(job, slot)
        # The boundary of a thread: its completion would be lost with it, so the caller gets the error.
        except BaseException as error:
            for result in running:
                result.set_exception(error)
            raise
        seconds, cpu = time.monotonic() - asked, job.cpu / len(endings)  # without what failed completions took alone
        for of, text, ending in zip(job.of, job.answers.texts, endings, strict=True):
            self._count(Scored(of, text[:_EXCERPT], seconds, ending[0], cpu, *ending[1:]))
        for result, (outcome, *_) in zip(job.results, endings, strict=True):
            if result.cancelled():
                continue
            if self._closing.is_set() and isinstance(outcome, Unscorable):
                result.set_exception(PoolClosed("the scoring pool was closed"))
            else:
                result.set_result(outcome)

    def _ask(self, job: _Job, slot: int) -> list[_Ending]:
        """Score completions, and find out who is to blame if that fails."""
        reply = self._reply(job, slot)
        if reply.failure == "starved":
            with self._turn:  # the fewer at once, the more CPU for each
                reply = self._reply(job, slot)
        if not reply.failure:
            self._share.add(len(reply.outcomes), 0)
            self._remember(job, reply.outcomes)
        if not reply.failure or self._closing.is_set():
            return [_ending(outcome) for outcome in reply.outcomes]
        return self._sorted_out(job, slot, reply) if len(reply.outcomes) > 1 else [self._judged(job, slot, reply)]

    def _sorted_out(self, job: _Job, slot: int, reply: Reply) -> list[_Ending]:
        """Find the answers that made a group fail, and score the others together, because a reward may compare them.

        One or two are left out by turns: they made it fail if the others then have scores. If that finds none, each
        failed completion is scored alone.
        """
        endings = [_ending(outcome) for outcome in reply.outcomes]
        failed = [i for i, (outcome, *_) in enumerate(endings) if isinstance(outcome, Unscorable)]
        rest = [*range(len(endings))]
        if (reply := self._again(job, slot, rest, reply)).failure:
            rest, reply = self._left_out(job, slot, failed, reply)
        found = {i: self._fault(job, i, endings[i]) for i in failed if not reply.failure and i not in rest}
        if reply.failure:
            alone = {i: self._ask(self._part(job, [i]), slot)[0] for i in failed}
            found = {i: ending for i, ending in alone.items() if caused_by_answer(ending[0])}
            rest = [i for i in rest if i not in found]
            if rest and (found or any(isinstance(ending[0], Score) for ending in alone.values())):
                reply = self._again(job, slot, rest, reply)
        if rest and reply.failure == "invalid":
            raise InvalidReward(_ending(reply.outcomes[0])[1])
        if not reply.failure:
            found |= {i: _ending(outcome) for i, outcome in zip(rest, reply.outcomes, strict=True)}
        return [found.get(i, ending) for i, ending in enumerate(endings)]

    def _again(self, job: _Job, slot: int, places: list[int], reply: Reply) -> Reply:
        """Score completions together until they have scores, or chance can no longer be why they have none."""
        for tries in range(1, blame.MOST if reply.failure != "starved" else 1):
            reply = self._reply(self._part(job, places), slot)
            if not reply.failure or self._share.chance(tries + 1) <= blame.CHANCE:
                break
        return reply

    def _left_out(self, job: _Job, slot: int, failed: list[int], reply: Reply) -> tuple[list[int], Reply]:
        """Return the completions that have scores once one or two of the failed ones are left out, and these scores."""
        everyone, outcome = [*range(len(job.answers.texts))], next(filter(_failed, reply.outcomes))
        down = time.monotonic() < self._down.get(blame.place(outcome), 0.0)
        until = time.monotonic() + self._deadline * (2 if down else blame.PATIENCE)
        several = itertools.chain(itertools.combinations(failed, 1), itertools.combinations(failed, 2))
        for out in itertools.islice(several, _LEFT_OUT if reply.failure != "starved" else 0):
            rest = [i for i in everyone if i not in out]
            if len(rest) > 1 and not (others := self._reply(self._part(job, rest), slot)).failure:
                return rest, others
            if time.monotonic() > until:
                break
        return everyone, reply

    def _part(self, job: _Job, places: Sequence[int]) -> _Job:
        ids = job.answers.token_ids
        part = replace(
            job.answers,
            texts=[job.answers.texts[i] for i in places],
            token_ids=None if ids is None else [ids[i] for i in places],
        )
        return self._job(part, [job.of[i] for i in places])

    def _remember(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        """Keep what later failures are compared with."""
        side = _side(job.answers.columns)
        for text, outcome in zip(job.answers.texts, outcomes, strict=True):
            if isinstance(outcome, Score) and len(text) <= _LONGEST_CONTROL:
                self._latest[side].append(text)
                if outcome.reward == self._highest[side]:
                    if len(self._best) == _BEST:
                        self._best.clear()
                    self._best[hash(json.dumps(dict(job.answers.columns), sort_keys=True))] = outcome.reward, text

    def _reply(self, job: _Job, slot: int) -> Reply:
        """Let a worker grade, and replace it if it cannot be used again."""
        while True:
            process = self._workers.ready(slot)
            try:
                count = len(job.answers.texts)
                reply = process.ask(job.number, job.request, count, seconds=self._deadline * count)
            except ChannelClosed:  # the process died while idle, so it never received this completion
                self._workers.kill(slot)
                continue
            job.cpu += reply.cpu
            if rewards := [one.reward for one in reply.outcomes if isinstance(one, Score)]:
                side = _side(job.answers.columns)
                self._lowest[side] = min(self._lowest[side], *rewards)
                self._highest[side] = max(self._highest[side], *rewards)
            if not reply.usable:
                self._workers.kill(slot)
            return reply

    def _judged(self, job: _Job, slot: int, reply: Reply) -> _Ending:
        """Return what a completion gets whose scoring failed."""
        [outcome], side = reply.outcomes, _side(job.answers.columns)
        assert isinstance(outcome, Unscorable)
        bests, right = self._known(job)
        controls = self._controls(job, slot, [*bests, *reversed(self._latest[side])], [*right, "0", ""])
        until, where = time.monotonic() + blame.PATIENCE * self._deadline, blame.place(outcome)

        def again() -> bool:
            nonlocal reply
            reply = self._reply(job, slot)
            return not reply.failure

        if reply.failure == "starved":
            return outcome, outcome.detail, not next(controls, False)
        plain = (*right, "") if reply.failure == "invalid" else ()
        if any(self._graded(job, slot, one).failure == "invalid" for one in plain):
            raise InvalidReward(outcome.detail)
        cause = "grader"
        if time.monotonic() >= self._down.pop(where, 0.0) or next(controls, False):
            cause = blame.find_cause(again, lambda: next(controls, None), self._share, lambda: time.monotonic() < until)
        if cause == "none":
            self._remember(job, reply.outcomes)
            return _ending(reply.outcomes[0])
        if cause == "grader":
            self._down[where] = time.monotonic() + blame.SHARED
            return _ending(outcome)
        return self._fault(job, 0, _ending(outcome))

    def _known(self, job: _Job) -> tuple[list[str], list[str]]:
        """Return the best answer to this prompt, if there is one, and all that are known to be right."""
        side = _side(job.answers.columns)
        reward, best = self._best.get(hash(json.dumps(dict(job.answers.columns), sort_keys=True)), (math.nan, ""))
        # While no answer is better than another, the best one need not be right.
        bests = [best] if self._lowest[side] < reward == self._highest[side] else []
        return bests, [*bests, *itertools.islice(blame.references(dict(job.answers.columns)), _CONTROLS)]

    def _fault(self, job: _Job, place: int, ending: _Ending) -> _Ending:
        """Return what a completion gets that made its scoring fail."""
        (outcome, why, _), text, side = ending, job.answers.texts[place], _side(job.answers.columns)
        assert isinstance(outcome, Unscorable)
        fault = self._fault_rewards[side]
        if blame.agrees(text, self._known(job)[1]):
            found: Outcome = Unscorable(outcome.reason, f"{ON_RIGHT}{outcome.detail}; the answer: {text[:_EXCERPT]!r}")
        elif fault is None:
            found = Unscorable(outcome.reason, BY_ANSWER + outcome.detail)
        else:  # if the range has no lower end, the lowest reward so far
            fault = self._lowest[side] if math.isinf(fault) else fault
            found = Score(fault, {FAULT + outcome.reason: fault})
        return found, why, False

    def _controls(self, job: _Job, slot: int, known: Sequence[str], guesses: Sequence[str]) -> Iterator[bool]:
        """Yield whether a control has a score, try after try; nothing if there is no control."""
        [own] = job.answers.texts
        waiting = deque(one for one in dict.fromkeys(known) if one != own)
        for guess in () if waiting else guesses:
            if guess != own and not self._graded(job, slot, guess).failure:
                waiting.append(guess)
                yield True
                break
        for asked in itertools.count() if waiting else ():
            if failure := self._graded(job, slot, waiting[0]).failure:
                waiting.rotate(-1)
                if not asked:  # the failed answer may have broken the worker
                    self._workers.kill(slot)
            yield not failure

    def _graded(self, job: _Job, slot: int, text: str) -> Reply:
        """Grade another answer with the columns of a failed one."""
        asked = self._job(replace(job.answers, texts=[text], token_ids=None), [""])
        reply = self._reply(asked, slot)
        job.cpu += asked.cpu
        return reply

    def _count(self, entry: Scored) -> None:
        with self._lock:
            self._tally.add(entry)
            if not self._tally.too_many:
                return
            error = TooManyFailures.of(self._tally)
        self._stop(error)


def _failed(outcome: Outcome) -> TypeGuard[Unscorable]:
    return isinstance(outcome, Unscorable)


def _ending(outcome: Outcome) -> _Ending:
    return outcome, outcome.detail if isinstance(outcome, Unscorable) else "", True


def _together(futures: "Sequence[Future[Outcome]]") -> "Future[list[Outcome]]":
    """Return one future of all results, or of the first error. Cancelling it cancels them."""
    whole: Future[list[Outcome]] = Future()
    left = itertools.count(len(futures) - 1, -1)  # counting is atomic

    def ended(_: "Future[Outcome]") -> None:
        if next(left) == 0 and whole.set_running_or_notify_cancel():
            errors = [error for one in futures if not one.cancelled() and (error := one.exception())]
            if errors:
                whole.set_exception(errors[0])
            else:
                whole.set_result([one.result() for one in futures])

    for one in futures:
        one.add_done_callback(ended)
    whole.add_done_callback(lambda done: [one.cancel() for one in futures] if done.cancelled() else None)
    return whole
