"""The end-to-end benchmark: processes that take turns, forced lengths, and the rows made from them."""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench import end_to_end, side_by_side
from lab.bench.end_to_end import COMPARISONS, SETS, figures, limits, share_of_sync
from lab.bench.end_to_end_arms import Job, offbeat_settings
from offbeat.config import parse
from tests.fixtures.forced_lengths import lottery, prompts
from tests.fixtures.gates import PhaseTimer, Turn, TurnProcess
from tests.fixtures.runs import Broken

JOB = Job.parse("48+32x8x8")
COUNTING = """
import sys, time
from tests.fixtures.gates import Turns
turns, spent, steps = Turns(*map(int, sys.argv[1].split(","))), 0.0, 0
while True:
    time.sleep(0.01); spent += 0.01; steps += 1
    if not turns.step_done({"training": spent}, {"steps": steps}):
        break
"""


def eventually_stopped(pid: int) -> bool:
    """Return whether the process stops within seconds: a signal takes effect when the process is next scheduled."""
    for _ in range(500):
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_a_process_makes_as_many_steps_as_it_is_told_and_none_in_between(tmp_path: Path) -> None:
    with TurnProcess("counting", [sys.executable, "-c", COUNTING], {}, tmp_path / "output.txt") as process:
        process.ready(60)
        assert eventually_stopped(process._process.pid), "a process that waits for its turn is stopped"
        time.sleep(0.1)
        turn = process.turn(3, 60)
        assert turn.extra["steps"] == 1 + 3
        assert turn.phases["training"] == pytest.approx(0.01) and turn.seconds < 1, "both are per step"
        assert sum(turn.phases.values()) == pytest.approx(turn.seconds)
        assert process.turn(1, 60).extra["steps"] == 5
    assert process._process.returncode == 0


def test_a_process_that_fails_is_reported_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no model')"]
    with (
        pytest.raises(Broken, match="no model"),
        TurnProcess("broken", command, {}, tmp_path / "output.txt") as process,
    ):
        process.ready(60)


class Words:
    """A tokenizer with one token a word, except for one pair of words that it joins."""

    vocab_size = 700

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(" " + "".join(chr(97 + int(digit)) for digit in str(one)) for one in token_ids)

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.replace(" faa fab", " x").split())))


def test_prompts_have_exactly_the_length_and_differ() -> None:
    tokenizer = cast(Any, Words())
    texts = prompts(tokenizer, 12, 50)
    assert len(set(texts)) == 50 and {len(tokenizer.encode(text)) for text in texts} == {12}


def test_rewards_of_different_completions_differ() -> None:
    assert len(set(lottery([f"answer {i}" for i in range(100)]))) == 100


def test_settings_of_our_runs_force_the_length_and_are_valid() -> None:
    for every, concurrent in ((1, False), (10, False), (10, True)):
        settings = offbeat_settings(JOB, every=every, concurrent=concurrent)
        config = parse(settings)
        assert config.sampling.ignore_eos and config.sampling.max_tokens == 32
        assert config.longest == every and (config.run.mode == "concurrent") == concurrent


def test_micro_batches_of_peers_divide_the_batch_and_fit() -> None:
    shapes = [Job.parse(f"{lengths}x8x8") for lengths in ("48+32", "128+128", "32+256")]
    assert [job.rows_together(4096) for job in shapes] == [32, 16, 8]


def test_lengths_that_are_not_forced_are_an_error() -> None:
    JOB.check({"prompt": [48, 48], "completion": [32]})
    with pytest.raises(AssertionError, match=r"\{'completion': \[31, 32\]\}"):
        JOB.check({"prompt": [48], "completion": [32, 31]})


def turns(*seconds: float, **extra: float) -> list[Turn]:
    return [Turn(one, {"generation": one / 2, "training": one * 0.48, "sync": one * 0.02}, extra) for one in seconds]


def test_a_row_is_the_median_of_ratios_within_rounds_and_a_shortfall_has_a_reason() -> None:
    measured = {
        "bare": turns(2.0, 4.0, 2.0, flops=JOB.flops, copy=1e10),
        "v1": turns(3.0, 6.0, 5.0),
        "v10": turns(3.0, 3.0, 3.0),
        "concurrent": turns(2.0, 2.0, 2.0, lag=9.0),
        "trl": turns(12.0, 12.0, 12.0),
    }
    measured["limit"] = limits(measured["bare"], JOB)
    rows = {row.id: row for row in figures(measured, measured["bare"], JOB)}
    assert rows.keys() == {
        "throughput.1.limit-48-32", "throughput.1.trl-48-32", "throughput.1.trl-v10-48-32", "throughput.1.concurrent",
        "throughput.4.share-48-32",
    }  # fmt: skip
    limit = rows["throughput.1.limit-48-32"]  # the bare engine for 1, 2 and 1 s, and 1 s for the products
    assert limit.measured == 2.0 and not limit.holds and limit.n == 3
    assert limit.note.startswith("short mainly because of ") and "range 1.50 to 2.50" in limit.note
    assert rows["throughput.1.trl-48-32"].measured == 2.4 and not rows["throughput.1.trl-48-32"].holds
    assert rows["throughput.1.trl-v10-48-32"].measured == 4.0 and rows["throughput.1.trl-v10-48-32"].holds
    assert rows["throughput.1.concurrent"].measured == 1.5 and "lag 9.0" in rows["throughput.1.concurrent"].note


def test_a_shape_without_a_goal_is_reported() -> None:
    job = Job.parse("32+256x8x8")
    measured = {"bare": turns(2.0, flops=job.flops, copy=1e10), "v1": turns(9.0), "trl": turns(9.0)}
    measured["limit"] = limits(measured["bare"], job)
    rows = figures(measured, measured["bare"], job)
    *reported, share = rows
    assert [row.id for row in reported] == ["throughput.1.limit-32-256", "throughput.1.trl-32-256"]
    assert all(row.goal == "reported" and row.holds for row in reported)
    assert share.id == "throughput.4.share-32-256" and share.goal == "<= 3 %" and share.measured == 2.0 and share.holds


def test_a_set_without_the_bare_engine_has_rows_without_rates_and_without_the_share_of_sync() -> None:
    [row] = figures({"v1": turns(3.0), "trl-default": turns(12.0)}, [], JOB)
    assert row.id == "throughput.1.trl-default-48-32" and row.measured == 4.0 and "tokens/s" not in row.note


def test_the_share_of_sync_is_the_median_over_rounds() -> None:
    shares = share_of_sync([Turn(2.0, {"sync": 0.02}), Turn(1.0, {"sync": 0.5}), Turn(1.0, {"sync": 0.04})], JOB)
    assert shares.measured == 4.0 and not shares.holds and shares.n == 3 and "range 1.00 to 50.00" in shares.note


def test_every_comparison_is_within_exactly_one_set_of_arms() -> None:
    for one in COMPARISONS:
        pair = {one.over, "bare" if one.under == "limit" else one.under}
        assert sum(pair <= set(arms) for arms in SETS) == 1, one.name
    assert "bare" in SETS[0], "all rows cite the rates that it measures"


def test_rows_of_a_set_are_recorded_before_the_next_set_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[object] = []

    @contextmanager
    def fake_started(job: Job, names: Sequence[str], place: Path) -> Iterator[list[str]]:
        happened.append(tuple(names))
        yield list(names)

    def fake_turns(names: Sequence[str], rounds: int, steps: object) -> dict[str, list[Turn]]:
        return {name: turns(2.0, flops=JOB.flops, copy=1e10, lag=0.0) for name in names}

    monkeypatch.setattr(end_to_end, "started", fake_started)
    monkeypatch.setattr(end_to_end, "take_turns", fake_turns)
    monkeypatch.setattr(end_to_end, "report", lambda short, *rows: happened.append(len(rows)) or True)
    assert end_to_end.measure(JOB, SETS, short=False)
    assert happened == [SETS[0], 3, *itertools.chain(*((arms, 1) for arms in SETS[1:]))]


def arm(training: float, *seconds: float) -> list[Turn]:
    return [Turn(one, {"generation": one - training, "training": training}) for one in seconds]


def test_arms_stand_side_by_side_with_their_engines_and_are_compared_within_rounds() -> None:
    steps = {"v1": arm(1.0, 2.0, 4.0, 2.0), "trl-vllm": arm(2.0, 3.0, 6.0, 4.0), "trl": arm(2.0, 8.0, 8.0, 8.0)}
    rows = {row.id.removeprefix("door.2."): row for row in side_by_side.figures("trl", steps, JOB)}
    assert rows.keys() == {f"{name}-48-32" for name in (
        "step", "generation", "training", "trl-vllm", "trl", "training-ratio",
    )}  # fmt: skip
    assert rows["step-48-32"].measured == "2.00 / 4.00 / 8.00"
    assert rows["training-48-32"].measured == "1.00 / 2.00 / 2.00"
    arms = rows["step-48-32"].what.partition(": ")[2].split("; ")[:-1]
    assert ["vLLM" in one for one in arms] == [True, True, False] and "transformers" in arms[2]
    assert rows["trl-vllm-48-32"].measured == 1.5 and "range 1.50 to 2.00" in rows["trl-vllm-48-32"].note
    assert rows["training-ratio-48-32"].measured == 2.0


def test_another_set_of_arms_has_rows_of_its_own() -> None:
    rows = side_by_side.figures("torchrl", {"v1": arm(1.0, 2.0), "torchrl": arm(3.0, 9.0)}, JOB)
    assert [row.id for row in rows] == [f"door.2.{name}-48-32" for name in (
        "step-torchrl", "generation-torchrl", "training-torchrl", "torchrl",
    )]  # fmt: skip
    [row] = side_by_side.figures("halves", {"half": arm(2.0, 2.0, 2.0), "trl-half": arm(4.0, 5.0, 5.0)}, JOB)
    assert row.id == "door.2.half-48-32" and row.measured == 2.5 and row.n == 2


def test_a_phase_timer_adds_up_what_blocks_take() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("training"):
            time.sleep(0.01)
    assert timer.spent.keys() == {"training"} and timer.spent["training"] >= 0.02
