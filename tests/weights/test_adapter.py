"""What a version of an adapter run is: which base it belongs to, how it is merged, and how it is kept in the log."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offbeat.errors import AdapterMismatch, DamagedFile, ModelUnreadable
from offbeat.weights.adapter import AdapterSpec, load_base_digest, merged
from offbeat.weights.manifest import File, TensorEntry, VersionManifest
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription

SPEC = AdapterSpec(2, 4.0, ("q_proj",), "1f" * 32)
LAYER = "model.layers.0.self_attn.q_proj"
NAMES = tuple(f"base_model.model.{LAYER}.lora_{which}.weight" for which in "AB")


def an_adapter(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, ((2, 8), (6, 2)), strict=True)}


def test_the_digest_of_a_base_sees_every_bit_and_name_but_not_the_files(tmp_path: Path) -> None:
    whole = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}

    def digest(name: str, *files: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        for number, tensors in enumerate(files):
            save_file(tensors, tmp_path / name / f"part-{number}.safetensors")
        return load_base_digest(tmp_path / name)

    expected = digest("whole", whole)
    assert digest("parts", {"b": whole["b"]}, {"a": whole["a"]}) == expected
    changed = whole["a"].clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    others = [{**whole, "a": changed}, {**whole, "b": whole["b"].float()}, {"a": whole["a"], "c": whole["b"]}]
    assert len({expected, *(digest(f"other {i}", one) for i, one in enumerate(others))}) == 4


def test_a_changed_file_is_read_again_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    before = load_base_digest(tmp_path)
    save_file({"a": torch.ones(4)}, file)
    assert load_base_digest(tmp_path) != before
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelUnreadable, match="cannot be read"):
        load_base_digest(tmp_path)


def test_a_merge_is_computed_in_float32_and_rounded_once() -> None:
    adapter = {name: tensor.bfloat16() for name, tensor in an_adapter().items()}
    weight, other = torch.randn(6, 8).bfloat16(), torch.randn(3)
    found = dict(merged([("norm.weight", other), (f"{LAYER}.weight", weight)], adapter, SPEC))
    a, b = (adapter[name].double() for name in NAMES)
    exact = weight.double() + 2.0 * (b @ a)
    assert found["norm.weight"] is other and found[f"{LAYER}.weight"].dtype == torch.bfloat16
    error = (found[f"{LAYER}.weight"].double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-6).all(), "half a unit in the last place of bfloat16"


def test_a_merge_that_does_not_fit_is_refused() -> None:
    weight = (f"{LAYER}.weight", torch.zeros(6, 8))
    with pytest.raises(AdapterMismatch, match="has no weight of"):
        dict(merged([("other.weight", weight[1])], an_adapter(), SPEC))
    with pytest.raises(AdapterMismatch, match="lacks"):
        dict(merged([weight], {NAMES[0]: an_adapter()[NAMES[0]]}, SPEC))
    with pytest.raises(AdapterMismatch, match="of rank 4 has A"):
        dict(merged([weight], an_adapter(), replace(SPEC, rank=4)))
    with pytest.raises(AdapterMismatch, match="is not a tensor of an adapter"):
        dict(merged([weight], {"model.layers.0.q_proj.lora_A.default.weight": weight[1]}, SPEC))


def test_every_version_is_whole_and_says_which_adapter_it_is(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path, adapter=SPEC) as log, Subscription.open(tmp_path, name="reader") as reader:
        kinds = [log.publish(version, an_adapter(version).items()).kind for version in range(3)]
        assert kinds == ["anchor"] * 3
        for version in (2, 0):
            found = reader.fetch(version)
            assert all(torch.equal(found[name], tensor) for name, tensor in an_adapter(version).items())
            assert reader.adapter(version) == SPEC
        assert log.find_problem(2) is None


def test_whole_weights_have_no_adapter_also_in_manifests_of_earlier_releases() -> None:
    anchor = File("data/a.safetensors", 120, "00" * 32)
    manifest = VersionManifest.made(3, {"w": TensorEntry("BF16", (4,), "11" * 32, None)}, anchor=anchor)
    body = json.loads(manifest.serialize().partition(b"\n")[2])
    assert body.pop("adapter") is None
    earlier = VersionManifest._from_json(body)
    assert earlier.adapter is None and earlier.state == manifest.state


@pytest.mark.parametrize("broken", [{"rank": 0}, {"targets": []}, {"alpha": "much"}])
def test_a_manifest_with_a_broken_adapter_is_damaged(broken: dict[str, object]) -> None:
    anchor = File("data/a.safetensors", 120, "00" * 32)
    entries = {"w": TensorEntry("BF16", (4,), "11" * 32, None)}
    good = VersionManifest.made(3, entries, anchor=anchor, adapter=SPEC)
    assert VersionManifest.parse(good.serialize(), "x").adapter == SPEC
    bad = VersionManifest.made(3, entries, anchor=anchor, adapter=replace(SPEC, **broken))  # type: ignore[arg-type]
    with pytest.raises(DamagedFile, match="does not describe a version"):
        VersionManifest.parse(bad.serialize(), "x")
