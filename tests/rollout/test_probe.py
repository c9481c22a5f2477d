"""The probe tells an engine that serves what was published from one that does not."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rollout.probe import FLOOR, ProbeFailed, Prober, judge
from offbeat.rollout.scripted import ScriptedEngine, scripted_probe
from offbeat.weights.probe import Probe, ProbeError

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
    with pytest.raises(ProbeFailed, match="not what this run started from"):
        asyncio.run(Prober.calibrated(ScriptedEngine(16, weights(9)), probe(0)))


def test_a_probe_on_other_sequences_is_no_comparison() -> None:
    engine, prober = start()
    with pytest.raises(ProbeError, match="log-probs"):
        asyncio.run(prober.check(engine, scripted_probe(weights(0), 16, ((1, 2),))))


coarse = st.floats(0.01, 0.1)


@given(st.integers(0, 2**32 - 1), coarse, st.floats(0.001, 0.1))
def test_with_a_coarse_engine_a_stale_version_is_seen_and_a_loaded_one_is_not_accused(
    seed: int, gap: float, move: float
) -> None:
    """An engine of 16 bits has a steady rounding of its own, of which a small part is drawn anew by every load."""
    rng = np.random.default_rng(seed)
    trainer = rng.normal(-5, 2, 96)
    rounding = rng.normal(0, gap, 96)
    before = Prober(3 * float(np.abs(rounding).mean()), trainer.astype(np.float32), (trainer + rounding).astype("f"))
    published = trainer + rng.normal(0, move, 96)
    loaded = published + rounding + rng.normal(0, gap / 10, 96)
    assert judge(before, published.astype(np.float32), loaded.astype(np.float32)).passed
    assert not judge(before, published.astype(np.float32), before.measured).passed


def test_a_stale_half_is_seen_within_a_tolerance_that_hides_it() -> None:
    rng = np.random.default_rng(0)
    trainer, rounding = rng.normal(-5, 2, 96), rng.normal(0, 0.05, 96)
    body, head = rng.normal(0, 0.02, 96), rng.normal(0, 0.02, 96)
    before = Prober(0.15, trainer.astype(np.float32), (trainer + rounding).astype(np.float32))
    verdict = judge(before, (trainer + body + head).astype("f"), (trainer + rounding + body).astype("f"))
    assert verdict.near and not verdict.moved
    assert "of the trainer's move" in str(verdict)


def test_a_gap_that_is_not_a_number_fails() -> None:
    _, prober = start()
    assert not judge(prober, prober.published, np.full_like(prober.published, np.nan)).passed
