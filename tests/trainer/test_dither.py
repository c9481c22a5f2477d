"""Dithered masters: the weights of the file at first, and on average every update from the first one on."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from offbeat.trainer import optimizer as module
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule, dither

RATE = 1e-5
"""A small part of half a step of the grid, 6e-5, at weights of 0.02."""


def layer(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    model = nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.empty(256, 256).uniform_(0.016, 0.031).bfloat16())
    return model.to(dtype)


def master(optimizer: MasterAdamW) -> torch.Tensor:
    return optimizer.tensors()["master/weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_stay_and_masters_fill_their_rounding_intervals(dtype: torch.dtype) -> None:
    model = layer(dtype)
    before = model.weight.detach().clone()
    optimizer = MasterAdamW(model, OptimizerSettings(), rounds_to=torch.bfloat16)
    dither(optimizer, seed=3)
    assert torch.equal(model.weight, before)
    places = (master(optimizer) - before.float()) / 2.0**-13  # in steps of the grid between 2**-6 and 2**-5
    assert torch.equal(master(optimizer).bfloat16(), before.bfloat16()) and float(places.abs().max()) <= 0.5
    counts = torch.histc(places, bins=8, min=-0.5, max=0.5) / places.numel()
    assert counts.tolist() == pytest.approx([1 / 8] * 8, abs=0.01)


@pytest.mark.parametrize("dithered", [False, True])
def test_small_updates_reach_the_weights_on_average_only_if_masters_are_dithered(dithered: bool) -> None:
    model = layer()
    before = model.weight.detach().float().clone()
    optimizer = MasterAdamW(model, OptimizerSettings(Schedule(RATE)))
    if dithered:
        dither(optimizer, seed=3)
    model.weight.float().sum().backward()
    optimizer.update(0)
    moved = float((model.weight.detach().float() - before).mean())
    assert moved == pytest.approx(-RATE if dithered else 0.0, rel=0.05)


def test_zeros_and_masters_off_the_grid_stay() -> None:
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, -0.0, 0.1]]))
    before = model.weight.detach().clone()
    dither(MasterAdamW(model, OptimizerSettings()), seed=3)
    assert torch.equal(model.weight, before)


def test_values_at_the_ends_of_their_exponent_round_back_too() -> None:
    values = torch.tensor([1.0, -1.0, 2.0**-126, 2.0**-133, -(2.0**127), 1.9921875, 3.3895313892515355e38])
    model = nn.Linear(7, 2000, bias=False)
    with torch.no_grad():
        model.weight.copy_(values.expand(2000, 7))
    optimizer = MasterAdamW(model, OptimizerSettings())
    dither(optimizer, seed=3)
    assert torch.equal(model.weight.bfloat16().float(), values.expand(2000, 7))
    assert bool((model.weight.std(0) > 0)[:6].all())


@pytest.mark.parametrize("cuts", [(0, 100), (0, 7, 64, 100), (0, 0, 100)])
def test_slices_of_any_number_of_ranks_get_the_same_masters(
    cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAM", 16)
    whole = torch.linspace(0.1, 1.0, 100).bfloat16().float()
    slices = [whole[low:high].clone() for low, high in pairwise(cuts)]
    module._dither(whole, 0, 100, seed=5)
    for low, one in zip(cuts, slices, strict=False):
        module._dither(one, low, 100, seed=5)
    assert torch.equal(torch.cat(slices), whole)


def test_seeds_and_tensors_have_streams_of_their_own() -> None:
    found = set()
    for seed in (1, 2):
        model = nn.Sequential(*(nn.Linear(2, 1, bias=False, dtype=torch.bfloat16) for _ in range(2)))
        for one in model.parameters():
            nn.init.constant_(one, 0.5)
        optimizer = MasterAdamW(model, OptimizerSettings())
        dither(optimizer, seed)
        found |= {
            value for name in ("0", "1") for value in optimizer.tensors()[f"master/{name}.weight"].view(-1).tolist()
        }
    assert len(found) == 8
