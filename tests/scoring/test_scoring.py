"""Scoring pool: whatever happens to its workers, every completion ends once, with a score or the right reason."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lab.torture import scoring as torture_scoring
from offbeat.errors import InvalidReward, PoolClosed, PoolError
from offbeat.imports import load_file
from offbeat.scoring.pool import BoundedQueue, ScoringPool
from offbeat.scoring.tally import FailureLimit, Scored, ScoringTally, TooManyFailures
from offbeat.tasks.rewards import FOR_EVALUATION, Answers, Reward
from offbeat.tasks.task import Task
from offbeat.types import BY_ANSWER, Score, Unscorable
from tests.fixtures.scoring_reward import expected
from tests.scoring import scorers

ROOT = Path(__file__).parent.parent.parent
NEVER = FailureLimit(share=1.0)
WAIT = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    settings = {"deadline": 1.5, "workers": 2, "memory_mib": 256, "limit": NEVER}
    with ScoringPool([Reward(scorers.act)], answer_fault="unscorable", **settings) as opened:  # type: ignore[arg-type]
        yield opened


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("return nan", "invalid", "finite"),
        ("raise", "crash", "KeyError"),
        ("unsafe", "sandbox", "no namespaces"),
        ("slow", "timeout", "own limit"),
        ("sleep 60", "timeout", "after 1.5 s"),
        ("spin", "timeout", "after 1.5 s"),
        ("stop", "timeout", "after 1.5 s"),
        ("kill", "crash", "killed by SIGKILL"),
        ("exit", "crash", "exited with code 3"),
        ("eat", "crash", "more than 256 MiB"),
        ("huge", "invalid", "finite"),
        ("offline", "crash", "did not answer"),
    ],
)
def test_a_failure_ends_as_unscorable_with_its_reason(pool: ScoringPool, text: str, reason: str, detail: str) -> None:
    outcome = pool.score(text, {}).result(timeout=WAIT)
    assert isinstance(outcome, Unscorable) and outcome.reason == reason and detail in outcome.detail, outcome
    assert pool.score("return 0.5", {}).result(timeout=WAIT) == Score(0.5, {"act": 0.5})


def test_results_come_in_the_order_asked_for(pool: ScoringPool) -> None:
    texts = [f"return {n / 100}" for n in range(100)]
    outcomes = pool.score_all([(text, {}) for text in texts])
    assert [outcome.reward for outcome in outcomes if isinstance(outcome, Score)] == [n / 100 for n in range(100)]


def test_the_report_names_the_slowest_and_the_failing_completions(pool: ScoringPool) -> None:
    pool.score("sleep 1", {}, of="sleeper").result(timeout=WAIT)
    pool.score("raise", {}, of="raiser").result(timeout=WAIT)
    report = pool.report()
    assert report.failing[-1].of == "raiser" and "KeyError" in str(report.failing[-1])
    assert "sleeper" in {entry.of for entry in report.slowest}
    assert [entry.seconds for entry in report.slowest] == sorted((e.seconds for e in report.slowest), reverse=True)


def test_any_text_reaches_the_worker_unchanged() -> None:
    with ScoringPool([Reward(scorers.length)], (0.0, 1e9), workers=1) as pool:
        for text in ["", "\n\r\0\u2028", "\ud800 alone", "é" * 300_000]:
            assert pool.score(text, {"nested": {"a": [1, None]}}).result(timeout=WAIT) == Score(
                len(text) / 10, {"length": len(text) / 10}
            )


def test_a_worker_that_leaks_exits_before_its_memory_limit_hits_a_completion() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1, memory_mib=256) as pool:
        outcomes = pool.score_all([("leak", {})] * 40)
        assert all(isinstance(outcome, Score) for outcome in outcomes) and pool.report().restarts >= 2


def test_the_size_of_the_pools_own_process_does_not_count() -> None:
    ballast = bytearray(b"x") * (400 << 20)
    with ScoringPool([Reward(scorers.one)], workers=1, memory_mib=256) as pool:
        pool.score_all([("x", {})] * 20)
        assert pool.report().restarts == 0 and len(ballast) > 256 << 20


def test_columns_that_are_not_json_raise_in_the_caller_and_affect_no_other_completion(pool: ScoringPool) -> None:
    with pytest.raises(TypeError, match="the columns of g1/0 must be JSON"):
        pool.score("x", {"when": object()}, of="g1/0")  # type: ignore[dict-item]
    assert pool.score("return 1", {}).result(timeout=WAIT) == Score(1.0, {"act": 1.0})


@pytest.mark.parametrize(
    "reply", ['{"job": 0}', '{"reward": NaN, "breakdown": {}, "job": 0}', "[]", "[" * 9_999, "7 7"]
)
def test_an_invalid_reply_of_a_worker_is_a_crash_and_never_a_reward(reply: str) -> None:
    with ScoringPool([Reward(scorers.act)], answer_fault="unscorable", workers=1, limit=NEVER) as pool:
        outcome = pool.score(f"forge {reply.replace(' ', '')}", {}).result(timeout=WAIT)
        assert isinstance(outcome, Unscorable) and outcome.reason == "crash" and "invalid reply" in outcome.detail, (
            outcome
        )
        assert pool.score("return 1", {}).result(timeout=WAIT) == Score(1.0, {"act": 1.0})


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_to_an_idle_worker_costs_no_completion(sent: signal.Signals) -> None:
    with ScoringPool([Reward(scorers.one)], workers=1, deadline=1.0) as pool:
        [pid] = pool.pids
        os.kill(pid, sent)
        time.sleep(0.1)
        outcomes = pool.score_all([("x", {})] * 20)
        assert outcomes == [Score(1.0, {"one": 1.0})] * 20 and pool.pids != [pid]


@pytest.mark.parametrize("text", ["child", "daemon"])
@pytest.mark.parametrize("ending", ["kill", "return 1"])
def test_whatever_a_worker_has_started_dies_with_it(text: str, ending: str) -> None:
    seconds = f"{random.SystemRandom().uniform(1e5, 9e5):.6f}"  # the name by which this test finds its processes
    with ScoringPool([Reward(scorers.act)], workers=1, deadline=5.0, limit=NEVER) as pool:
        pool.score(f"{text} {seconds}", {}).result(timeout=WAIT)
        _until_one_runs(seconds)
        pool.score("return 0.5", {}).result(timeout=WAIT)  # the control of the next one, which starts nothing
        pool.score(ending, {}).result(timeout=WAIT)
        if ending == "kill":
            pool.score("return 1", {}).result(timeout=WAIT)
            assert _running(seconds) == []
    assert _running(seconds) == []


def _until_one_runs(argument: str) -> None:
    """Wait until a process shows this argument: `Popen` returns before the kernel has written the command line."""
    deadline = time.monotonic() + WAIT
    while len(_running(argument)) != 1:
        assert time.monotonic() < deadline, f"no process has the argument {argument}"
        time.sleep(0.01)


def _running(argument: str) -> list[str]:
    """Return the processes with this argument."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if argument.encode() in file.read_bytes():
                found.append(file.parent.name)
    return found


def test_a_full_queue_blocks_the_caller() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1, waiting=2, deadline=5.0) as pool:
        start = time.monotonic()
        futures = [pool.score("sleep 0.2", {}) for _ in range(6)]
        assert (
            time.monotonic() - start > 0.4
        )  # one with the worker, two in the queue, three blocked until there was room
        assert all(isinstance(future.result(timeout=WAIT), Score) for future in futures)


def test_too_many_failures_stop_the_pool_with_examples() -> None:
    limit = FailureLimit(share=0.3, window=20, least=10)
    with ScoringPool([Reward(scorers.act)], workers=2, limit=limit) as pool:
        futures = [pool.score("return 1", {}) for _ in range(10)]
        with pytest.raises(
            TooManyFailures, match=r"(?s)allowed; the last of them:.*g\d+ after .*cannot be read"
        ) as stopped:
            while True:
                futures.append(pool.score("return 1", {"broken": True}, of=f"g{len(futures)}"))
        assert stopped.value.examples and all(isinstance(e.outcome, Unscorable) for e in stopped.value.examples)
        assert not wait(futures, timeout=WAIT).not_done
        ends = [future.exception() or future.result() for future in futures]
        assert all(isinstance(end, (Score, Unscorable, TooManyFailures)) for end in ends)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("return 5", r"^reward 5.0 is outside 0 to 1: set reward_range=\(0, 5\), or"),
        ("return -0.5", r"^reward -0.5 is outside 0 to 1: set reward_range=\(-1, 1\)"),
        ("string", r"^reward 'act' returned '1.0', a str, for one completion; return a number"),
    ],
)
def test_what_can_be_no_reward_of_the_task_stops_the_pool_if_a_right_answer_has_it(text: str, says: str) -> None:
    with ScoringPool([Reward(scorers.act)], workers=1) as pool:
        assert pool.score("return 1", {}).result(timeout=WAIT) == Score(1.0, {"act": 1.0})
        with pytest.raises(InvalidReward, match=says):
            pool.score(text, {"answer": text}).result(timeout=WAIT)
        with pytest.raises(InvalidReward, match=says):
            while True:
                pool.score("return 1", {}).result(timeout=WAIT)


def test_a_function_that_raises_for_every_answer_stops_the_pool_soon_with_its_own_error_first() -> None:
    says = r"^act: ValueError: the reference cannot be read \(scorers.py, line \d+\)\n100.0% of the last"
    with ScoringPool([Reward(scorers.act)], workers=1) as pool, pytest.raises(TooManyFailures, match=says):
        for _ in range(FailureLimit().none + 2):
            pool.score("", {"broken": True}).result(timeout=WAIT)
            time.sleep(0.01)


def ranked(completions: list[str], **columns: object) -> list[float]:
    """Compare completions, of which one may be broken."""
    if any(text == "spin" for text in completions):
        while True:
            pass
    values = [float(text) for text in completions]
    return [sum(value > other for other in values) / 10 for value in values]


def test_a_trl_function_sees_all_completions_of_a_prompt_and_a_broken_one_spoils_only_itself() -> None:
    with ScoringPool([Reward(ranked, trl=True)], workers=2, deadline=0.5) as pool:

        def scored(*texts: str) -> list[tuple[float, str]]:
            outcomes = pool.score_group(Answers(texts, {"prompt": "?"})).result(timeout=WAIT)
            return [(one.reward, one.fault) for one in outcomes if isinstance(one, Score)]

        assert scored("3", "1", "2") == [(0.2, ""), (0.0, ""), (0.1, "")]
        assert scored("3", "one", "2") == [(0.1, ""), (0.0, "crash"), (0.0, "")]
        assert scored("3", "1", "spin", "2") == [(0.2, ""), (0.0, ""), (0.0, "timeout"), (0.1, "")]
        assert pool.report().answer_faults == {"crash": 1, "timeout": 1}


def test_completions_of_a_prompt_that_are_cancelled_together_are_not_scored() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1) as pool:
        first = pool.score("sleep 0.5", {})
        group = pool.score_group(Answers(["kill", "kill"], {}))
        assert group.cancel() and isinstance(first.result(timeout=WAIT), Score) and pool.report().restarts == 0


def test_closing_ends_every_waiting_completion() -> None:
    pool = ScoringPool([Reward(scorers.act)], workers=1, deadline=60.0)
    futures = [pool.score("sleep 30", {}) for _ in range(5)]
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 10
    assert all(isinstance(future.exception(timeout=WAIT), PoolClosed) for future in futures)
    with pytest.raises(PoolClosed):
        pool.score("x", {})


def test_a_cancelled_completion_is_not_scored() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1) as pool:
        first = pool.score("sleep 0.5", {})
        second = pool.score("kill", {})
        assert second.cancel()
        assert isinstance(first.result(timeout=WAIT), Score) and pool.report().restarts == 0


def test_a_reward_function_that_does_not_import_fails_when_the_pool_starts(tmp_path: Path) -> None:
    file = tmp_path / "fragile.py"
    file.write_text("def reward(text, columns):\n    return 1.0\n")
    reward = Reward(load_file(file).reward)
    file.write_text("import no_such_module\n")
    with pytest.raises(PoolError, match=r"could not import file:.*fragile.py:reward: ModuleNotFoundError.*3 attempts"):
        ScoringPool([reward], workers=1)


def test_a_reward_function_that_hangs_on_import_fails_with_its_name_and_the_deadline(tmp_path: Path) -> None:
    file = tmp_path / "sluggish.py"
    file.write_text("def reward(text, columns):\n    return 1.0\n")
    reward = Reward(load_file(file).reward)
    file.write_text("import time; time.sleep(60)\n")
    with pytest.raises(
        PoolError, match=r"no scoring worker has been ready.*waited 1 s for a scoring worker to import file:"
    ):
        ScoringPool([reward], workers=1, start_seconds=1.0)


def test_a_worker_that_is_stopped_while_it_starts_is_replaced_soon() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1, deadline=10.0) as pool:
        [pid] = pool.pids
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # until it has ended; it is idle, so no completion is lost
        future = pool.score("return 1", {})
        while (pids := pool.pids) in ([pid], []):
            time.sleep(0.005)
        os.kill(pids[0], signal.SIGSTOP)
        assert future.result(timeout=WAIT) == Score(1.0, {"act": 1.0})
        assert time.monotonic() - start < 30  # the first start may take 60 s, this one a few times what the first took


def test_workers_find_functions_of_a_script_and_trl_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from functools import partial\n"
        "from offbeat.tasks.rewards import Reward, from_trl\n"
        "from offbeat.scoring.pool import ScoringPool\n"
        "def long(text, columns, *, least):\n    return float(len(text) >= least)\n"
        "def trl(completions, **kwargs):\n    return [0.5 for _ in completions]\n"
        "if __name__ == '__main__':\n"
        "    rewards = [Reward(partial(long, least=3), weight=0.5), from_trl(trl)]\n"
        "    with ScoringPool(rewards, workers=1) as pool:\n"
        "        print(pool.score('abc', {}).result(timeout=60).breakdown)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "{'long': 0.5, 'trl': 0.5}\n", done.stderr


def test_workers_die_with_the_process_that_owns_them(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import time\n"
        "from offbeat.tasks.rewards import Reward\n"
        "from offbeat.scoring.pool import ScoringPool\n"
        "def spin(text, columns):\n    while True: pass\n"
        "if __name__ == '__main__':\n"
        "    pool = ScoringPool([Reward(spin)], workers=1, deadline=600.0)\n"
        "    pool.score('x', {})\n"
        "    print(pool.pids[0], flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_failure_share_counts_the_window_only() -> None:
    tally = ScoringTally(FailureLimit(share=0.5, window=4, least=4))
    bad = Scored("x", "", 0.0, Unscorable("crash"))
    good = Scored("x", "", 0.0, Score(1.0))
    verdicts = []
    for entry in [bad, bad, bad, good, good, bad, good, good]:
        tally.add(entry)
        verdicts.append(tally.too_many)
    assert verdicts == [False, False, False, True, False, False, False, False]
    assert tally.report().scored == 4 and tally.report().unscorable == {"crash": 4}


def test_answers_that_make_their_scoring_fail_are_counted_and_stop_nothing() -> None:
    tally = ScoringTally(FailureLimit(share=0.0, window=4, least=1))
    for outcome in (Score(0.0, {"unscorable.timeout": 0.0}), Unscorable("crash", BY_ANSWER + "it died")):
        tally.add(Scored("x", "", 0.0, outcome, why="it took too long"))
    report = tally.report()
    assert not tally.too_many and report.answer_faults == {"timeout": 1, "crash": 1} and report.unscorable == {}
    assert "because the answer made its scoring fail (timeout: it took too long)" in str(report.failing[0])


def test_a_queue_that_ends_wakes_the_threads_that_wait_for_it() -> None:
    queue: BoundedQueue[int] = BoundedQueue(capacity=1)
    queue.put(1, seconds=1.0)
    with pytest.raises(TimeoutError, match="a queue of 1 was full"):
        queue.put(2, seconds=0.01)
    raised: list[BaseException] = []

    def put_into_the_full_queue() -> None:
        try:
            queue.put(2, seconds=30.0)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=put_into_the_full_queue)
    thread.start()
    assert queue.end(RuntimeError("over")) == [1] and queue.get() is None
    thread.join(10)
    assert str(raised[0]) == "over"


def test_the_torture_notices_lost_wrong_and_unexplained_outcomes() -> None:
    def ledger(**outcomes: object) -> torture_scoring.Ledger:
        found = torture_scoring.Ledger()
        for number in range(3):
            found.end(number, outcomes.get(f"n{number}", Score(expected(number))))  # type: ignore[arg-type]
        return found

    assert torture_scoring.wrong_outcomes(ledger(), 3) == []
    assert torture_scoring.wrong_outcomes(ledger(), 4) == ["3: ended 0 times"]
    assert "Score(reward=0.0" in torture_scoring.wrong_outcomes(ledger(n1=Score(0.0)), 3)[0]
    killed = ledger(n1=Unscorable("crash", "the worker was killed by SIGKILL while scoring"))
    assert torture_scoring.wrong_outcomes(killed, 3) == ["1 completions ended by SIGKILL, and 0 strikes of that kind"]
    killed.struck["SIGKILL"] = 1
    assert torture_scoring.wrong_outcomes(killed, 3) == []


@pytest.mark.engine
def test_the_torture_of_workers_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.torture.scoring", "--short"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_prompts_of_evaluation_are_scored_by_its_own_rewards_which_do_not_see_the_mark() -> None:
    training = Task("t", [], (Reward(scorers.one),))
    task = replace(training, evaluation=Task("e", [], (Reward(scorers.columns_seen),), reward_range=(0.0, 9.0)))
    with ScoringPool.of(task, workers=1) as pool:
        marked, plain = pool.score_all([("x", {"a": 1, "b": 2, FOR_EVALUATION: True}), ("x", {"a": 1})])
    assert marked == Score(2.0, {"columns_seen": 2.0}) and plain == Score(1.0, {"one": 1.0})
