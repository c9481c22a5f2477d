"""Patches restore every bit, and damaged ones are refused."""

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.errors import DamagedFile
from offbeat.weights import delta
from offbeat.weights.delta import DTYPES, Bits, Words, apply, changed_at, encode

SPECIAL = {  # NaNs with payloads, both zeros, the smallest denormal, infinity
    1: [0x00, 0x80, 0x7F, 0xFF, 0x01],
    2: [0x0000, 0x8000, 0x7FC1, 0xFFFF, 0x7F81, 0x0001, 0x8001, 0x7F80],
    4: [0, 1 << 31, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 1, 0x80000001, 0x7F800000],
    8: [0, 1 << 63, 0x7FF8000000000001, (1 << 64) - 1, 0x7FF0000000000001, 1, 0x7FF0000000000000],
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Words, Words]:
    """Generate two states of a tensor: any width, any bits, from nothing changed to everything."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    dtype = np.dtype(f"<u{width}")
    size = draw(st.integers(0, 300))
    elements = st.one_of(st.sampled_from(SPECIAL[width]), st.integers(0, 2 ** (8 * width) - 1))
    base = draw(npst.arrays(dtype, size, elements=elements, fill=st.nothing()))
    new = base.copy()
    share = draw(st.sampled_from([0.0, 0.004, 0.1, 0.5, 0.9, 1.0]))
    where = np.random.default_rng(draw(st.integers(0, 2**32))).random(size) < share
    if draw(st.booleans()):
        new[where] += dtype.type(1)  # one unit in the last place, as in training
    else:
        new[where] = draw(npst.arrays(dtype, int(where.sum()), elements=elements, fill=st.nothing()))
    return base, new


@given(pairs(), st.sampled_from([7, 64, delta.CHUNK]))
@example((np.zeros(0, np.uint16), np.zeros(0, np.uint16)), 7)
def test_every_bit_survives_the_round_trip(pair: tuple[Words, Words], chunk: int) -> None:
    base, new = pair
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(delta, "CHUNK", chunk)
        blocks, changed = encode(base, new)
        restored, advanced = base.copy(), base.copy()
        apply(restored, blocks)
        assert encode(advanced, new, advance=True) == (blocks, changed)
        fresh = np.empty_like(new)
        apply(fresh, encode(None, new)[0])
    assert restored.tobytes() == advanced.tobytes() == fresh.tobytes() == new.tobytes()
    assert changed == int((base != new).sum()) == changed_at(base, new).size
    assert bool(blocks) == bool(changed)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 3, 2)])
def test_every_dtype_and_shape_survives_conversion_to_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)  # valid for bool too
    tensor = raw.flatten().view(dtype).reshape(shape)
    bits = Bits.of(tensor)
    assert bits.shape == shape and len(bits.raw()) == tensor.numel() * dtype.itemsize
    back = bits.copy().tensor()
    assert back.dtype == dtype and back.shape == tensor.shape
    assert Bits.of(back).raw() == bits.raw() and Bits.of(back).fingerprint() == bits.fingerprint()


def test_a_transposed_tensor_keeps_its_element_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert Bits.of(tensor.T).tensor().tolist() == tensor.T.tolist()


def test_one_changed_element_in_a_million_costs_a_few_bytes() -> None:
    base = np.random.default_rng(0).integers(0, 2**16, 1_000_000, np.uint16)
    new = base.copy()
    new[777_777] ^= 1
    blocks, changed = encode(base, new)
    assert changed == 1 and len(blocks) < 80


def test_changes_by_one_unit_in_the_last_place_cost_less_than_two_bytes_each() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2**16, 1_000_000, np.uint16)
    new = base + np.where(rng.random(base.size) < 0.004, rng.choice([1, 65535], base.size), 0).astype(np.uint16)
    blocks, changed = encode(base, new)
    assert 3500 < changed < 4500 and len(blocks) < 2 * changed


def test_a_completely_changed_tensor_is_stored_dense_and_never_much_larger_than_raw() -> None:
    rng = np.random.default_rng(0)
    base, new = rng.integers(0, 2**16, (2, 200_000), np.uint16)
    assert len(encode(base, new)[0]) < 1.01 * new.nbytes
    zeros = np.zeros_like(base)
    assert len(encode(base, zeros)[0]) < 0.01 * zeros.nbytes


@settings(max_examples=300)
@given(pairs(), st.data())
def test_damaged_blocks_never_write_outside_the_tensor_or_crash(pair: tuple[Words, Words], data: st.DataObject) -> None:
    base, new = pair
    blocks = bytearray(encode(base, new)[0])
    if not blocks:
        return
    how = data.draw(st.sampled_from(["cut", "lengthen", "alter"]))
    if how == "cut":
        broken = bytes(blocks[: data.draw(st.integers(1, len(blocks))) - 1]) or b"\xff"
    elif how == "lengthen":
        broken = bytes(blocks) + b"\0"
    else:
        blocks[data.draw(st.integers(0, len(blocks) - 1))] ^= data.draw(st.integers(1, 255))
        broken = bytes(blocks)
    guarded = np.zeros(base.size + 64, base.dtype)
    guarded[: base.size] = base
    try:
        apply(guarded[: base.size], broken)
    except DamagedFile:
        pass
    else:  # an altered difference still decodes; only the file's sha256 detects it, and that is checked first
        assert how == "alter"
    assert not guarded[base.size :].any()
