"""What the trainer of a run computes with."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from lab.parity.served import STARTS, first_masters
from offbeat.config import parse
from offbeat.placement import hardware
from offbeat.run.learner import make_trainer
from offbeat.trainer.fsdp import Ranks, named_tensors, serving_state
from offbeat.types import Json
from tests.fixtures.ranks import run_ranks
from tests.fixtures.tiny_model import save_llama


@pytest.mark.parametrize(
    ("instructions", "dtype"), [("fpu avx512_bf16", torch.bfloat16), ("fpu avx2", torch.float32)], ids=["has", "lacks"]
)
@pytest.mark.parametrize("rank", [0, 4], ids=["full", "adapter"])
def test_a_cpu_without_bfloat16_trains_the_weights_that_engines_serve_in_float32(
    instructions: str, dtype: torch.dtype, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {instructions}\n")
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    save_llama(tmp_path, tied=True)
    settings = {"optimizer": {"learning_rate": 1e-3}, "adapter": {"rank": rank}, "objective": {"kl_coefficient": 0.1}}
    trainer = make_trainer(parse({"model": {"path": str(tmp_path)}, "engine": {"kind": "hf"}} | settings), Ranks())
    model = trainer.policy_model
    for step in range(2):
        served = dict(serving_state(model, torch.bfloat16))
        assert all(torch.equal(one, served[name].to(dtype)) for name, one in named_tensors(model))
        assert all(one.dtype == dtype for one in model.parameters())
        assert all(torch.equal(one, one.bfloat16().to(dtype)) for one in model.parameters())
        model.model(torch.arange(8)[None]).logits.float().logsumexp(-1).sum().backward()
        trainer.optimizer.update(step)
    masters = [value for name, value in trainer.optimizer.tensors().items() if name.startswith("master/")]
    assert any(not torch.equal(one, one.bfloat16().float()) for one in masters), "small updates add up in masters"


@pytest.mark.parametrize(
    ("compute", "serve", "dithered"),
    [("bfloat16", "bfloat16", True), ("bfloat16", "float32", False), ("bfloat16", "float16", False),
     ("float32", "float32", False)],
)  # fmt: skip
def test_masters_are_dithered_if_trainer_and_engines_both_round_to_bfloat16(
    compute: str, serve: str, dithered: bool, tmp_path: Path
) -> None:
    save_llama(tmp_path, tied=True)
    model = {"path": str(tmp_path), "compute": compute, "serve": serve}
    trainer = make_trainer(parse({"model": model, "engine": {"kind": "hf"}}), Ranks())
    parameters = dict(trainer.policy_model.named_parameters())
    masters = {name.removeprefix("master/"): value for name, value in trainer.optimizer.tensors().items()}
    moved = {name: not torch.equal(masters[name], parameter.float()) for name, parameter in parameters.items()}
    assert set(moved.values()) == {dithered}
    assert all(torch.equal(masters[name].bfloat16(), one.bfloat16()) for name, one in parameters.items())


@pytest.mark.parametrize("dither", [True, False])
def test_masters_start_on_the_grid_of_bfloat16_if_dither_is_off(dither: bool, tmp_path: Path) -> None:
    save_llama(tmp_path, tied=True)
    settings = {"model": {"path": str(tmp_path)}, "engine": {"kind": "hf"}, "optimizer": {"dither": dither}}
    trainer = make_trainer(parse(settings), Ranks())
    masters = [value for name, value in trainer.optimizer.tensors().items() if name.startswith("master/")]
    on_grid = [bool((one == one.bfloat16().float()).all()) for one in masters]
    assert set(on_grid) == {not dither}


def masters_and_weights(ranks: Ranks, directory: str) -> Json:
    """Build the trainer of a run; return all masters, and the weights of version 0 on the first rank."""
    trainer = make_trainer(parse({"model": {"path": directory}, "engine": {"kind": "hf"}}), ranks)
    states = trainer.optimizer.tensors().items()
    masters = {name: one for name, one in states if name.startswith("master/")}
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in masters.items()}
    served = dict(serving_state(trainer.policy_model, torch.bfloat16))
    return [{name: one.tolist() for name, one in found.items()} for found in (whole, served)]


@pytest.mark.engine
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_dithers_the_same_masters_and_serves_the_weights_of_the_file(
    size: int, tmp_path: Path
) -> None:
    save_llama(tmp_path, tied=True)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    alone = masters_and_weights(Ranks(), str(tmp_path))
    ranks = run_ranks(masters_and_weights, size, (str(tmp_path),))
    assert isinstance(alone, list) and ranks[0] == alone
    assert all(isinstance(rank, list) and rank[0] == alone[0] for rank in ranks)
    masters, served = alone
    assert isinstance(masters, dict) and isinstance(served, dict)
    assert served == {name: one.tolist() for name, one in model.named_parameters()}
    assert len(masters) == len(served) and all(masters[f"master/model.{name}"] != one for name, one in served.items())


@pytest.mark.engine
def test_one_two_and_three_ranks_start_from_the_same_masters_if_the_files_are_in_float32(tmp_path: Path) -> None:
    """Dithered or not, all weights or an adapter."""
    model = save_llama(tmp_path, tied=True)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in model.parameters())
    found = [rank for size in (1, 2, 3) for rank in run_ranks(first_masters, size, (str(tmp_path), STARTS))]
    assert len(found) == 6 and all(rank == found[0] for rank in found)
    assert isinstance(found[0], list)
    dithered, _, plain, _ = found[0]
    assert isinstance(dithered, dict) and isinstance(plain, dict)
    assert dithered.keys() == plain.keys() and all(dithered[name] != plain[name] for name in plain)
