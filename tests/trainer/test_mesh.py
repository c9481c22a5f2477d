"""Ranks on several nodes: replicated across nodes, sharded within each, with the results of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.fsdp import Ranks, by_node, serving_state, transformer_blocks
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Json
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import one_step_each, small_batch, small_trainer, steps_with_checkpoints

Reduce = Literal["once", "scatter"]
TWO_NODES = by_node(["a", "a", "b", "b"])
PRESETS = ["grpo", "grpo+kl", "m2po"]


def steps_on_two_nodes(ranks: Ranks, place: str, reduce: Reduce) -> Json:
    return one_step_each(replace(ranks, nodes=TWO_NODES, reduce=reduce), PRESETS, place, True)


def steps_reduced_once(ranks: Ranks, place: str) -> Json:
    return one_step_each(replace(ranks, reduce="once"), PRESETS, place, True)


def checkpoints_on_two_nodes(ranks: Ranks, place: str, steps: int, every: int) -> Json:
    return steps_with_checkpoints(replace(ranks, nodes=TWO_NODES), place, steps, every)


def relative(a: Path, b: Path) -> float:
    """The distance of all weights together, relative to their norm."""
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys()
    whole, other = (torch.cat([tensors[name].flatten() for name in ours]) for tensors in (ours, theirs))
    return float((whole - other).norm() / whole.norm())


def assert_same_steps(found: list[Json], alone: Json, place: Path, ranks: int) -> None:
    assert isinstance(alone, dict)
    for preset in PRESETS:
        for rank in found:
            assert isinstance(rank, dict)
            assert rank[preset] == pytest.approx(alone[preset], rel=1e-5, abs=1e-6), preset
        assert relative(place / f"{preset}-1-False.safetensors", place / f"{preset}-{ranks}-True.safetensors") <= 1e-6


@pytest.mark.engine
@pytest.mark.parametrize("reduce", ["scatter", "once"])
def test_two_nodes_of_two_ranks_make_the_update_of_one_process(tmp_path: Path, reduce: Reduce) -> None:
    alone = one_step_each(Ranks(), PRESETS, str(tmp_path), False)
    assert_same_steps(run_ranks(steps_on_two_nodes, 4, (str(tmp_path), reduce)), alone, tmp_path, 4)


@pytest.mark.engine
def test_gradients_that_are_reduced_once_make_the_update_of_one_process(tmp_path: Path) -> None:
    alone = one_step_each(Ranks(), PRESETS, str(tmp_path), False)
    assert_same_steps(run_ranks(steps_reduced_once, 2, (str(tmp_path),)), alone, tmp_path, 2)


@pytest.mark.engine
def test_a_checkpoint_of_two_nodes_holds_every_row_once_and_resumes_from_the_same_bits(tmp_path: Path) -> None:
    through = run_ranks(checkpoints_on_two_nodes, 4, (str(tmp_path / "through"), 4, 2))
    stopped = tmp_path / "stopped"
    run_ranks(checkpoints_on_two_nodes, 4, (str(stopped), 2, 2))
    resumed = run_ranks(checkpoints_on_two_nodes, 4, (str(stopped), 4, 2))
    for before, after in zip(through, resumed, strict=True):
        assert isinstance(before, dict) and isinstance(after, dict)
        assert set(after) == {"2", "3", "4"} and after.items() <= before.items()
    alone = small_trainer()
    with Checkpoints(stopped, config={"every": 2}) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None
        policy = [name for part in newest.manifest.parts for name in part.entries if name.startswith("policy/")]
        assert all(policy.count(name) == 2 for name in policy), "two slices of each tensor, not four"
        newest.restore(alone)
    assert alone.step == 4


def refused_then_trained(ranks: Ranks, reduce: Reduce) -> Json:
    """Refuse a batch because of a group that breaks the log-probs, then train; return the weights."""
    torch.set_num_threads(1)
    ranks = replace(ranks, nodes=TWO_NODES if ranks.size == 4 else (), reduce=reduce)
    trainer = small_trainer(ranks=ranks, sharded=ranks.size > 1)
    original = trainer.policy_model.temperature
    trainer.policy_model.temperature = float("nan")
    assert isinstance(trainer.train(small_batch(0, groups=7)), RefusedBatch)
    trainer.policy_model.temperature = original
    done = trainer.train(small_batch(0, groups=7))
    assert isinstance(done, Trained), done
    weights = [tensor.flatten() for _, tensor in serving_state(trainer.policy_model, torch.float32)]
    return torch.cat(weights).tolist() if weights else None


@pytest.mark.engine
@pytest.mark.parametrize("reduce", ["scatter", "once"])
def test_a_refused_batch_leaves_no_gradient_behind_for_the_next_one(reduce: Reduce) -> None:
    alone, [sharded, *_] = refused_then_trained(Ranks(), reduce), run_ranks(refused_then_trained, 4, (reduce,))
    assert torch.allclose(torch.tensor(alone), torch.tensor(sharded), rtol=1e-5, atol=1e-6)


def collectives(ranks: Ranks, reduce: Reduce) -> Json:
    """Count what one update of several micro-batches sends: reduce-scatters, and all-reduces of gradients."""
    torch.set_num_threads(1)
    ranks = replace(ranks, nodes=TWO_NODES, reduce=reduce)
    trainer = small_trainer(ranks=ranks, sharded=True)
    trainer.settings = replace(trainer.settings, updates_per_batch=1)
    groups = [*transformer_blocks(trainer.policy_model), trainer.policy_model]
    scatter, reduce_all = torch.distributed.reduce_scatter_single, torch.distributed.all_reduce
    with (
        patch("torch.distributed.reduce_scatter_single", side_effect=scatter) as scatters,
        patch("torch.distributed.all_reduce", side_effect=reduce_all) as all_reduces,
    ):
        assert isinstance(trainer.train(small_batch(0, groups=11)), Trained)
    gradients = [call for call in all_reduces.call_args_list if call.kwargs.get("group") is not ranks.group]
    return [scatters.call_count / len(groups), len(gradients) / len(groups)]


@pytest.mark.engine
def test_gradients_cross_nodes_once_per_update() -> None:
    [scattered, crossed], *_ = cast(list[list[float]], run_ranks(collectives, 4, ("scatter",)))
    assert scattered > 1, "within a node after every micro-batch"
    assert crossed == 1
    assert run_ranks(collectives, 4, ("once",)) == [[1, 1]] * 4


def test_ranks_that_do_not_fill_their_nodes_evenly_share_one_mesh() -> None:
    assert by_node(["a", "a", "b"]) == () == by_node(["a", "b", "c"])
    assert by_node(["a", "b", "b", "a"]) == ((0, 3), (1, 2))
