"""Masters keep what bfloat16 would lose, schedules are functions, and clipping uses the norm of all gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import a_llama
from torch import nn

from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule


def one_weight(dtype: torch.dtype) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return model


def push(model: nn.Module, gradient: float) -> None:
    (next(model.parameters()) * gradient).sum().backward()


class TestMasters:
    def test_steps_too_small_for_bfloat16_add_up(self) -> None:
        model = one_weight(torch.bfloat16)
        optimizer = MasterAdamW(model, OptimizerSettings(Schedule(1e-3)))
        values = []
        for step in range(16):
            push(model, 1.0)
            optimizer.update(step)
            values.append(float(model.weight.detach()))
        assert values[0] == 1.0  # 0.999 rounds to 1 in bfloat16
        assert float(optimizer.tensors()["master/weight"]) == pytest.approx(1 - 16e-3, rel=1e-5)
        assert values[-1] == pytest.approx(1 - 16e-3, rel=4e-3)

    def test_gradients_of_many_micro_batches_add_up_in_float32(self) -> None:
        model = one_weight(torch.bfloat16)
        optimizer = MasterAdamW(model, OptimizerSettings())
        for _ in range(1000):
            push(model, 1.0)
        assert optimizer.grad_norm() == 1000.0  # in bfloat16, 256 + 1 is 256

    def test_a_float32_parameter_is_its_own_master(self) -> None:
        model = one_weight(torch.float32)
        optimizer = MasterAdamW(model, OptimizerSettings())
        assert optimizer.tensors()["master/weight"].data_ptr() == model.weight.data_ptr()

    def test_float32_parameters_can_have_the_values_of_bfloat16(self) -> None:
        narrow, wide = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)
        wide.load_state_dict(narrow.state_dict())
        narrow_adamw = MasterAdamW(narrow, OptimizerSettings(Schedule(1e-3)))
        wide_adamw = MasterAdamW(wide, OptimizerSettings(Schedule(1e-3)), rounds_to=torch.bfloat16)
        for step in range(8):
            for model, optimizer in ((narrow, narrow_adamw), (wide, wide_adamw)):
                push(model, 1.0)
                optimizer.update(step)
            assert wide.weight.dtype == torch.float32 and torch.equal(wide.weight, narrow.weight.float())
        masters = [optimizer.tensors()["master/weight"] for optimizer in (narrow_adamw, wide_adamw)]
        assert torch.equal(*masters) and not torch.equal(masters[1], wide.weight), "masters keep what rounding loses"

    def test_parameters_are_rounded_before_the_first_update(self) -> None:
        model = one_weight(torch.float32)
        with torch.no_grad():
            model.weight.fill_(1.001)
        optimizer = MasterAdamW(model, OptimizerSettings(), rounds_to=torch.bfloat16)
        assert float(model.weight.detach()) == 1.0
        assert float(optimizer.tensors()["master/weight"]) == pytest.approx(1.001)

    def test_float32_and_bfloat16_take_the_same_path_up_to_rounding(self) -> None:
        masters = []
        for dtype in (torch.float32, torch.bfloat16):
            model = one_weight(dtype)
            optimizer = MasterAdamW(model, OptimizerSettings(Schedule(1e-2)))
            for step, gradient in enumerate([0.5, -0.25, 0.125, 2.0]):
                push(model, gradient)
                optimizer.update(step)
            masters.append(float(optimizer.tensors()["master/weight"]))
        assert masters[0] == masters[1]


class TestUpdate:
    def test_clipping_scales_the_whole_gradient_to_the_limit(self) -> None:
        clipped, small = (one_weight(torch.float32) for _ in range(2))
        optimizers = [MasterAdamW(m, OptimizerSettings(Schedule(1e-2), max_grad_norm=0.5)) for m in (clipped, small)]
        push(clipped, 50.0)
        push(small, 0.5)
        for optimizer in optimizers:
            optimizer.update(0)
        first, second = (optimizer.tensors()["exp_avg/weight"] for optimizer in optimizers)
        assert torch.allclose(first, second)

    def test_a_gradient_that_is_not_finite_is_not_applied(self) -> None:
        model = one_weight(torch.bfloat16)
        optimizer = MasterAdamW(model, OptimizerSettings())
        before = {name: value.clone() for name, value in optimizer.tensors().items()}
        push(model, math.nan)
        assert math.isnan(optimizer.grad_norm())
        with pytest.raises(ValueError, match="norm is nan"):
            optimizer.update(0)
        optimizer.discard()
        assert all(torch.equal(before[name], value) for name, value in optimizer.tensors().items())
        push(model, 1.0)
        assert optimizer.grad_norm() == 1.0

    @pytest.mark.parametrize("tied", [True, False])
    def test_only_matrices_that_are_not_embeddings_decay(self, tied: bool) -> None:
        model = a_llama(tie_word_embeddings=tied, attention_bias=True)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = MasterAdamW(model, OptimizerSettings(Schedule(0.1), weight_decay=0.5))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.update(0)
        for name, parameter in model.named_parameters():
            kept = "norm" in name or "bias" in name or "embed" in name
            assert torch.allclose(parameter, before[name] * (1.0 if kept else 0.95)), name


schedules = st.builds(
    lambda decay, warmup, length, floor: Schedule(1.0, warmup, decay, warmup + length, floor),
    st.sampled_from(Decay),
    st.integers(0, 20),
    st.integers(1, 200),
    st.floats(0, 1),
)


class TestSchedule:
    @given(schedules, st.integers(0, 300))
    def test_is_never_above_the_peak_nor_below_the_floor_after_the_warm_up(self, schedule: Schedule, step: int) -> None:
        rate = schedule.at(step)
        assert 0 < rate <= 1.0 + 1e-12 or schedule.floor == 0
        if step >= schedule.warmup_steps:
            assert rate >= schedule.floor - 1e-12

    @given(schedules, st.integers(0, 300))
    def test_rises_through_the_warm_up_and_never_after(self, schedule: Schedule, step: int) -> None:
        here, there = schedule.at(step), schedule.at(step + 1)
        assert here <= there if step + 1 < schedule.warmup_steps else there <= here + 1e-12

    def test_a_decay_without_an_end_is_refused(self) -> None:
        with pytest.raises(ValueError, match="give the number of steps"):
            Schedule(1e-6, warmup_steps=10, decay=Decay.COSINE)

    def test_the_update_uses_the_rate_of_its_step(self) -> None:
        model = one_weight(torch.float32)
        schedule = Schedule(1e-2, warmup_steps=4)
        optimizer = MasterAdamW(model, OptimizerSettings(schedule))
        push(model, 1.0)
        assert optimizer.update(1) == schedule.at(1) == 5e-3
        assert float(model.weight.detach()) == pytest.approx(1 - 5e-3, rel=1e-5)
