"""Probes survive JSON exactly, and broken ones are refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ProbeError
from offbeat.weights.probe import Probe, probe_sequences

floats = st.floats(-(2.0**100), 0, width=32)


@given(st.lists(st.lists(floats, min_size=1, max_size=5), min_size=1, max_size=4))
def test_log_probs_survive_json_bit_for_bit(values: list[list[float]]) -> None:
    probe = Probe([range(len(one) + 1) for one in values], values)
    again = Probe.from_json(json.loads(json.dumps(probe.to_json())))
    assert again.sequences == probe.sequences
    assert again.values.tobytes() == probe.values.tobytes()


@pytest.mark.parametrize(
    ("sequences", "logprobs"), [([], []), ([[1]], [[]]), ([[1, 2]], [[-1.0, -2.0]]), ([[1, 2]], [[math.nan]])]
)
def test_a_probe_that_proves_nothing_is_refused(sequences: list, logprobs: list) -> None:
    with pytest.raises(ProbeError):
        Probe(sequences, logprobs)


@pytest.mark.parametrize("data", [None, 3, {}, {"sequences": [[1, 2]]}, {"sequences": 3, "logprobs": []}])
def test_other_json_is_refused(data: object) -> None:
    with pytest.raises(ProbeError):
        Probe.from_json(data)  # type: ignore[arg-type]


def test_the_seed_determines_the_sequences_which_are_real_text_and_random_tokens() -> None:
    texts = [[5, 6, 7], [8] * 100, [9]]
    first = probe_sequences(texts, vocab_size=32, seed=3)
    assert first == probe_sequences(texts, vocab_size=32, seed=3) != probe_sequences(texts, vocab_size=32, seed=4)
    assert first[:2] == ((5, 6, 7), (8,) * 24) and len(first) == 4
    assert max(np.concatenate(first)) < 32
