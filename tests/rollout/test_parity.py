"""The probe detects an engine that does not serve the published version."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ProbeError, ProbeFailed
from offbeat.rollout.parity import FLOOR, Prober, judge, robust_std
from offbeat.weights.probe import Probe
from tests.fixtures.simulation.scripted_engine import ScriptedEngine, scripted_probe

SEQUENCES = ((1, 2, 3, 4, 5, 6), (7, 6, 5))


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((3,), float(seed), dtype=torch.bfloat16))]


def probe(seed: int) -> Probe:
    return scripted_probe(weights(seed), 16, SEQUENCES)


def start(deaf: bool = False) -> tuple[ScriptedEngine, Prober]:
    engine = ScriptedEngine(16, weights(0), deaf=deaf)
    return engine, asyncio.run(Prober.calibrated(engine, probe(0)))


def test_an_engine_that_loaded_passes() -> None:
    engine, prober = start()
    for version in range(1, 4):
        asyncio.run(engine.load(version, weights(version)))
        verdict = asyncio.run(prober.check(engine, probe(version)))
        assert verdict.passed and verdict.followed == pytest.approx(1)
    assert prober.tolerance == FLOOR


def test_an_engine_that_ignored_the_load_fails() -> None:
    engine, prober = start(deaf=True)
    asyncio.run(engine.load(1, weights(1)))
    verdict = asyncio.run(prober.check(engine, probe(1)))
    assert not verdict.near and not verdict.passed
    assert "mean |Δlogp| to the trainer" in str(verdict)


def test_another_model_cannot_calibrate() -> None:
    with pytest.raises(ProbeFailed, match="not the one this run started from"):
        asyncio.run(Prober.calibrated(ScriptedEngine(16, weights(9)), probe(0)))


def test_a_probe_on_other_sequences_is_refused() -> None:
    engine, prober = start()
    with pytest.raises(ProbeError, match="log-probs"):
        asyncio.run(prober.check(engine, scripted_probe(weights(0), 16, ((1, 2),))))


@st.composite
def coarse_runs(draw: st.DrawFn) -> tuple[Prober, list, list]:
    """Log-probs of a trainer that moves a little at each version, and of an engine; both have their own rounding."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rounding, move = draw(st.floats(0.001, 0.1)), draw(st.floats(0.0005, 0.3))
    paths = -5 + 2 * rng.normal(size=96) + np.cumsum(move * rng.normal(size=(60, 96)), 0)
    trainer = (paths + rounding * rng.normal(size=paths.shape)).astype(np.float32)
    engine = (paths + rounding * rng.normal(size=paths.shape)).astype(np.float32)
    gaps = engine[0] - trainer[0]
    start = Prober(robust_std(gaps), 3 * float(np.abs(gaps).mean()), trainer[0], engine[0])
    return start, list(trainer[1:]), list(engine[1:])


def with_jumps(rows: list, tokens: int, rng: np.random.Generator) -> list:
    """Add the jumps that a few unlikely tokens have in 16 bits."""
    return [row + np.where(np.arange(len(row)) < tokens, 2 * rng.normal(size=len(row)), 0).astype("f") for row in rows]


def judged(prober: Prober, trainer: list, engine: list) -> list[bool]:
    verdicts = []
    for published, measured in zip(trainer, engine, strict=True):
        verdict = judge(prober, published, measured)
        verdicts.append(verdict.passed)
        if verdict.passed and verdict.followed is not None:
            prober = replace(prober, published=published, measured=measured)
    return verdicts


@given(coarse_runs())
@settings(max_examples=300)
def test_a_coarse_engine_that_loads_every_version_is_never_accused(run: tuple[Prober, list, list]) -> None:
    assert all(judged(*run))


@given(coarse_runs(), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=300)
def test_an_engine_is_not_accused_if_a_few_log_probs_jump_by_whole_nats(
    run: tuple[Prober, list, list], tokens: int, seed: int
) -> None:
    prober, trainer, engine = run
    rng = np.random.default_rng(seed)
    prober = replace(prober, tolerance=1.0)  # another test covers the gap
    assert all(judged(prober, with_jumps(trainer, tokens, rng), with_jumps(engine, tokens, rng)))


def test_calibration_does_not_take_a_jump_for_rounding() -> None:
    engine, quiet = start()
    values = probe(0).values.copy()
    values[0] += 1.0
    jumped = asyncio.run(Prober.calibrated(engine, Probe(SEQUENCES, (values[:5], values[5:]))))
    assert jumped.rounding == pytest.approx(quiet.rounding, abs=1e-6)


@given(coarse_runs(), st.integers(0, 20))
@settings(max_examples=300)
def test_a_coarse_engine_that_stops_loading_is_detected_once_the_move_is_large_enough(
    run: tuple[Prober, list, list], stops: int
) -> None:
    start, trainer, engine = run
    stale = [*engine[:stops], *[engine[stops]] * (len(engine) - stops)]
    moved = [float(np.sqrt(np.mean((now - trainer[stops]) ** 2))) for now in trainer]
    verdicts = judged(start, trainer, stale)
    assert all(verdicts[: stops + 1])
    if max(moved) > 8 * start.rounding:
        assert not all(verdicts)


def test_a_half_updated_engine_is_detected_even_if_its_gap_is_within_tolerance() -> None:
    rng = np.random.default_rng(0)
    trainer, rounding = rng.normal(-5, 2, 96), rng.normal(0, 0.005, 96)
    body, head = rng.normal(0, 0.02, 96), rng.normal(0, 0.02, 96)
    before = Prober(0.005, 0.15, trainer.astype(np.float32), (trainer + rounding).astype(np.float32))
    verdict = judge(before, (trainer + body + head).astype("f"), (trainer + rounding + body).astype("f"))
    assert verdict.near and not verdict.moved
    assert "of the trainer's move" in str(verdict)


def test_a_gap_that_is_not_a_number_fails() -> None:
    _, prober = start()
    assert not judge(prober, prober.published, np.full_like(prober.published, np.nan)).passed
