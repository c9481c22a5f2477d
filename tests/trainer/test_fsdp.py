"""Sharded training gives the results of one process; a lost rank is named; nothing hangs."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.errors import RankDied, RankFailed, RankLost, RankSilent
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import GroupESS, SecondMoment
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, as_served, serving_state, shard
from offbeat.trainer.trainer import Trained
from offbeat.trainer.worst_case import StepShape, check_worst_case
from offbeat.types import Json
from tests.fixtures.ranks import GRACE, Watch, run_ranks
from tests.fixtures.small_trainer import (
    metrics_of_the_batch,
    one_step_each,
    small_batch,
    small_model,
    small_trainer,
    steps_with_checkpoints,
)
from tests.trainer.live_bytes import held_bytes


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The distance of all weights together, relative to their norm."""
    assert a.keys() == b.keys()
    whole, other = (torch.cat([tensors[name].flatten() for name in a]) for tensors in (a, b))
    return float((whole - other).norm() / whole.norm())


@pytest.mark.engine
def test_two_ranks_make_the_same_update_as_one_process_for_every_preset(tmp_path: Path) -> None:
    presets = [*sorted(PRESETS), "grpo+kl"]
    alone = one_step_each(Ranks(), presets, str(tmp_path), False)
    both = run_ranks(one_step_each, 2, (presets, str(tmp_path), True))
    assert isinstance(alone, dict)
    for rank in both:
        assert isinstance(rank, dict)
        for preset in presets:
            assert rank[preset] == pytest.approx(alone[preset], rel=1e-5, abs=1e-6), preset
    for preset in presets:
        found = [load_file(tmp_path / f"{preset}-{name}.safetensors") for name in ("1-False", "2-True")]
        assert relative(*found) <= 1e-6, preset


def gated_steps(ranks: Ranks, preset: str) -> Json:
    """Take two steps with a gate over the whole batch that stops a part of it; return metrics and weights."""
    torch.set_num_threads(1)
    trainer = small_trainer(preset, ranks=ranks, sharded=ranks.size > 1)
    tight = {"gate": SecondMoment(0.005)} if preset == "m2po" else {"reject": GroupESS(0.95)}
    trainer.settings = replace(trainer.settings, objective=replace(trainer.settings.objective, **tight))
    steps: list[Json] = []
    for step in range(2):
        done = trainer.train(small_batch(step, groups=7))
        assert isinstance(done, Trained), done
        steps.append(metrics_of_the_batch(done))
    weights = [tensor.flatten() for _, tensor in serving_state(trainer.policy_model, torch.float32)]
    return {"steps": steps, "weights": torch.cat(weights).tolist() if ranks.rank == 0 else None}


@pytest.mark.engine
@pytest.mark.parametrize("preset", ["m2po", "ess-gate"])
def test_two_ranks_stop_the_same_tokens_as_one_process_by_a_gate_over_the_whole_batch(preset: str) -> None:
    alone = gated_steps(Ranks(), preset)
    both = run_ranks(gated_steps, 2, (preset,))
    assert isinstance(alone, dict) and isinstance(alone["steps"], list)
    for rank in both:
        assert isinstance(rank, dict) and isinstance(rank["steps"], list)
        for found, expected in zip(rank["steps"], alone["steps"], strict=True):
            assert isinstance(expected, dict) and 0 < expected["gate_stopped_up"] < 1
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    first = both[0]
    assert isinstance(first, dict)
    assert relative(*({"all": torch.tensor(one["weights"])} for one in (alone, first))) <= 1e-6


def test_a_probe_in_float32_is_of_the_weights_as_they_are_published() -> None:
    policy_model = PolicyModel(small_model(tied=True))
    before = {name: tensor.clone() for name, tensor in policy_model.model.state_dict().items()}
    published = dict(serving_state(policy_model, torch.bfloat16))
    with as_served(policy_model, torch.bfloat16):
        inside = {name: tensor.clone() for name, tensor in policy_model.model.state_dict().items()}
    assert all(torch.equal(inside[name], tensor.float()) for name, tensor in published.items())
    assert not all(torch.equal(inside[name], before[name]) for name in published)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy_model.model.state_dict().items())


def test_the_serving_state_has_the_names_of_a_state_dict_and_a_tied_head_once() -> None:
    for tied in (True, False):
        model = small_model(tied=tied)
        state = dict(serving_state(PolicyModel(model), torch.bfloat16))
        expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
        assert state.keys() == expected and all(t.dtype == torch.bfloat16 for t in state.values())


def test_sharding_refuses_parameters_that_are_not_float32() -> None:
    with pytest.raises(ValueError, match="load the model in float32"):
        shard(PolicyModel(small_model(dtype=torch.bfloat16)), compute=torch.bfloat16)


def fails_on_one(ranks: Ranks) -> Json:
    """Rank 1 raises; rank 0 waits for it in a collective."""
    if ranks.rank == 1:
        raise KeyError("made to fail")
    ranks.sum(torch.zeros(1))
    return None


def leaves_early(ranks: Ranks) -> Json:
    if ranks.rank == 0:
        os._exit(3)
    ranks.sum(torch.zeros(1))
    return None


@pytest.mark.engine
def test_a_rank_that_raises_is_named_and_not_the_one_that_waited_for_it() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised KeyError: 'made to fail'") as lost:
        run_ranks(fails_on_one, 2)
    assert lost.value.rank == 1 and "fails_on_one" in str(lost.value)


@pytest.mark.engine
def test_a_rank_that_exits_without_an_error_is_named() -> None:
    with pytest.raises(RankDied, match="rank 0 ended with exit code 3"):
        run_ranks(leaves_early, 2)


def strike(place: Path, at_step: int, sign: signal.Signals) -> tuple[Callable[[Sequence[int]], None], list[float]]:
    """Send rank 1 a signal once the run has reached a step; also return when that was."""
    when: list[float] = []

    def wait_and_strike(pids: Sequence[int]) -> None:
        while not (place / "at").exists() or int((place / "at").read_text() or 0) < at_step:
            time.sleep(0.01)
        os.kill(pids[1], sign)
        when.append(time.monotonic())

    return lambda pids: threading.Thread(target=wait_and_strike, args=(pids,), daemon=True).start(), when


@pytest.mark.engine
def test_a_killed_or_stopped_rank_ends_the_run_within_twenty_seconds_and_resuming_is_bitwise(tmp_path: Path) -> None:
    through = run_ranks(steps_with_checkpoints, 2, (str(tmp_path / "through"), 12, 3))
    struck = tmp_path / "struck"
    struck.mkdir()
    for sign, kind, at_step in ((signal.SIGKILL, RankDied, 4), (signal.SIGSTOP, RankSilent, 8)):
        started, when = strike(struck, at_step, sign)
        with pytest.raises(RankLost) as lost:
            run_ranks(steps_with_checkpoints, 2, (str(struck), 1000, 3, 0.05), started=started, silence=3.0)
        assert type(lost.value) is kind and lost.value.rank == 1
        assert time.monotonic() - when[0] < 20
    resumed = run_ranks(steps_with_checkpoints, 2, (str(struck), 12, 3))
    for before, after in zip(through, resumed, strict=True):
        assert isinstance(before, dict) and isinstance(after, dict)
        assert 1 < len(after) < 12 and after.items() <= before.items() and "12" in after


@pytest.mark.engine
def test_another_number_of_ranks_resumes_from_the_same_bits(tmp_path: Path) -> None:
    two = run_ranks(steps_with_checkpoints, 2, (str(tmp_path / "two"), 3, 3))
    alone = small_trainer()
    with (
        Checkpoints(tmp_path / "two", config={"every": 3}) as from_two,
        Checkpoints(tmp_path / "one", config={"every": 3}) as from_one,
    ):
        newest = from_two.newest()
        assert newest is not None and len(newest.manifest.parts) == 2
        newest.restore(alone)
        from_one.save(alone, {})
    back = run_ranks(steps_with_checkpoints, 2, (str(tmp_path / "one"), 3, 3))
    for before, after in zip(two, back, strict=True):
        assert isinstance(before, dict) and isinstance(after, dict)
        assert after == {"3": before["3"]}


def held(ranks: Ranks) -> Json:
    """Run the worst case of a sharded trainer; return what it holds."""
    trainer = small_trainer(ranks=ranks, sharded=True)
    check_worst_case(trainer, StepShape(8, 8, 4))
    return dict(held_bytes(trainer))


@pytest.mark.engine
def test_a_rank_needs_memory_only_for_its_slices() -> None:
    alone = held_bytes(small_trainer())
    for rank in run_ranks(held, 2):
        assert isinstance(rank, dict)
        for name in ("master weights", "AdamW", "gradients"):
            assert rank[name] == pytest.approx(alone[name] / 2, rel=0.01)


def test_the_watch_blames_the_dead_rank_before_ranks_that_waited_for_it() -> None:
    watch = Watch(3, began=0.0)
    for rank in range(3):
        watch.beat(rank, 1.0)
    watch.fail(0, "raised RuntimeError: Connection closed by peer", 1.5)
    watch.end(0, 1, 1.5)
    assert watch.verdict(1.6) is None, "the cause may still appear"
    watch.end(2, -11, 1.7)
    lost = watch.verdict(1.7)
    assert isinstance(lost, RankDied) and lost.rank == 2 and "SIGSEGV" in str(lost)


def test_the_watch_blames_the_first_to_fail_when_all_fail() -> None:
    watch = Watch(2, began=0.0)
    watch.fail(1, "raised ValueError: x", 2.0)
    watch.fail(0, "raised RuntimeError: Connection closed by peer", 2.1)
    watch.end(0, 1, 2.2)
    watch.end(1, 1, 2.2)
    lost = watch.verdict(2.0 + GRACE)
    assert isinstance(lost, RankFailed) and lost.rank == 1


def test_the_watch_allows_a_slow_start_but_no_long_silence_after_it() -> None:
    watch = Watch(2, began=0.0, silence=10.0, starting=60.0)
    watch.beat(0, 50.0)
    assert watch.verdict(59.0) is None
    assert isinstance(silent := watch.verdict(60.5), RankSilent) and silent.rank == 0
    watch.beat(0, 60.5)
    assert isinstance(silent := watch.verdict(60.5), RankSilent) and silent.rank == 1


def test_a_rank_that_has_finished_may_be_silent() -> None:
    watch = Watch(2, began=0.0, silence=10.0)
    watch.beat(0, 1.0)
    watch.beat(1, 1.0)
    watch.end(0, 0, 2.0)
    watch.beat(1, 19.0)
    assert watch.verdict(20.0) is None and not watch.done
    watch.end(1, 0, 20.0)
    assert watch.done


@pytest.mark.engine
def test_a_trainer_alone_in_a_process_group_computes_the_same_bits(tmp_path: Path) -> None:
    run_ranks(one_step_each, 1, (["grpo"], str(tmp_path), True))
    one_step_each(Ranks(), ["grpo"], str(tmp_path), False)
    a, b = (load_file(tmp_path / f"grpo-1-{sharded}.safetensors") for sharded in (True, False))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert small_trainer().check.shared_prefix
