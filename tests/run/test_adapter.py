"""A run that trains an adapter, with real parts and a tiny model: from the first version to an exported model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offbeat.config import Config
from offbeat.errors import AdapterMismatch, CheckpointError, CheckpointMismatch
from offbeat.events import EventKind
from offbeat.run.build import load_tokenizer, make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck import check_run
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.seeds import derive
from offbeat.tasks.task import prompt_at
from offbeat.trainer.export import export, find_checkpoint, load_policy, logprobs_of
from offbeat.weights.adapter import AdapterSpec, load_base_digest
from offbeat.weights.probe import Probe
from offbeat.weights.subscriber import Subscription
from tests.fixtures.reference_loop import train as train_by_hand
from tests.fixtures.tiny_model import save_llama, save_model
from tests.run.digits_task import two_digits
from tests.run.test_local import config, parameters, ran

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return place


def asked_for(model: Path, **changes: object) -> Config:
    return config(model, **({"adapter": {"rank": 4}, "optimizer": {"learning_rate": 1e-2}} | changes))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of four steps with a KL term, whose reference policy is the base."""
    asked = asked_for(model, steps=4, objective={"preset": "rec-oneside-nois", "kl_coefficient": 0.01})
    return ran(asked, tmp_path_factory.mktemp("run") / "run")[1]


def test_twenty_lockstep_steps_are_those_of_an_independent_loop_bit_for_bit(model: Path, tmp_path: Path) -> None:
    asked = asked_for(model, steps=20)
    _, directory = ran(asked, tmp_path / "run")
    tokenizer, gate = load_tokenizer(asked), asked.objective.resolve().gate
    expected = train_by_hand(
        model,
        prompt_at(make_task(asked), tokenizer, derive(0, "prompts")),
        lambda ids: two_digits(tokenizer.decode(ids, skip_special_tokens=True), {}),
        lora=LoraConfig(r=4, lora_alpha=32, target_modules=[*asked.adapter.names]),
        steps=20, batch=4, size=4, tokens=5, lr=1e-2, clip=(gate.low, gate.high),
    )  # fmt: skip
    found = parameters(directory, asked)
    assert found.keys() == expected.keys() and any(found[name].any() for name in found if "lora_B" in name)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_transformers_engine_serves_adapters_in_16_bits(model: Path, tmp_path: Path) -> None:
    asked = asked_for(model, steps=3)
    in_16_bits = asked.model.model_copy(update={"compute": "bfloat16", "serve": "bfloat16"})
    events, _ = ran(asked.model_copy(update={"model": in_16_bits}), tmp_path / "run")
    versions = [event["version"] for event in events if event["kind"] == EventKind.PUBLISHED]
    lags = [event["lags"] for event in events if event["kind"] == EventKind.STEP]
    assert versions == [0, 1, 2, 3] and len(lags) == 3, "every version passed its probe"
    assert not any(lag for step in lags for lag in step), "and was used for the next step"


@pytest.mark.parametrize("every", [1, 2])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(model: Path, tmp_path: Path, every: int) -> None:
    asked = asked_for(model, steps=6, sync={"every": every})
    _, whole = ran(asked, tmp_path / "whole")
    cut = RunDirectory(tmp_path / "cut")
    cut.create(asked)
    loops: list[Loop] = []

    def stop_at_3(event: dict) -> None:
        if event["kind"] == EventKind.STEP and event["step"] == 3:
            loops[0].stop("test")

    train(asked, cut, watching=stop_at_3, started=loops.append)
    if every == 1:  # and the weight log is lost meanwhile: the policy of the checkpoint is published again
        shutil.rmtree(cut.path / "weights")
    train(asked, cut)
    repaired = [event["version"] for event in read(cut.events) if event["kind"] == EventKind.WEIGHTS_REPAIRED]
    assert repaired == ([3] if every == 1 else [])
    found, expected = parameters(cut, asked), parameters(whole, asked)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_version_is_a_whole_adapter_and_version_0_is_the_base(run: RunDirectory, model: Path) -> None:
    spec = AdapterSpec(4, 32.0, run.config().adapter.names, load_base_digest(model))
    with Subscription.open(run.path / "weights", name="test") as reader:
        assert reader.versions() == (0, 1, 2, 3, 4)
        for version in reader.versions():
            assert reader.adapter(version) == spec and reader._manifest(version).patch is None
        first = {name: tensor.clone() for name, tensor in reader.fetch(0).items()}
        last = reader.fetch(4)
        assert not any(tensor.any() for name, tensor in first.items() if "lora_B" in name)
        assert all(tensor.any() for name, tensor in last.items())
        probe = reader.probe(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert probe is not None and (logprobs_of(base, probe) == probe.values).all()
    assert [found for found in check_run(run) if found.remedy is not None] == [], "fsck finds nothing"


def test_an_exported_adapter_is_the_policy_in_plain_peft_and_in_transformers_if_merged(
    run: RunDirectory, model: Path, tmp_path: Path
) -> None:
    with Subscription.open(run.path / "weights", name="test") as reader:
        probe = reader.probe(4)
    assert probe is not None
    export(run.path, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").get_base_model()
    export(run.path, tmp_path / "merged", merge=True, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for one in (loaded, merged, load_policy(run.path, dtype=torch.float32)):
        assert np.abs(logprobs_of(one, probe) - probe.values).max() < 1e-5
    assert (tmp_path / "adapter" / "tokenizer.json").exists() and merged.dtype == torch.float32
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert np.abs(logprobs_of(base, probe) - probe.values).max() > 1e-2, "the policy has moved"


def test_an_export_that_would_be_another_policy_is_refused(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "other", tied=True)
    with pytest.raises(AdapterMismatch, match="trained on a base with the digest"):
        export(run.path, tmp_path / "out", base=tmp_path / "other")
    with pytest.raises(CheckpointError, match="leave `dtype` out"):
        export(run.path, tmp_path / "out", dtype=torch.bfloat16)
    doubled = AdapterSpec.peft_config
    monkeypatch.setattr(AdapterSpec, "peft_config", lambda spec: doubled(spec) | {"lora_alpha": 2 * spec.alpha})
    with pytest.raises(AdapterMismatch, match="compute other log-probs than the trainer did"):
        export(run.path, tmp_path / "out")
    monkeypatch.setattr(AdapterSpec, "scale", property(lambda spec: 2 * spec.alpha / spec.rank))
    with pytest.raises(AdapterMismatch, match="compute other log-probs than the trainer did"):
        export(run.path, tmp_path / "out", merge=True)
    assert not list(tmp_path.glob("out*"))


def test_a_run_whose_base_changed_is_not_resumed(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    asked = asked_for(tmp_path / "model", steps=2)
    _, directory = ran(asked, tmp_path / "run")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({n: t + 1e-3 for n, t in weights.items()}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=r"adapter\.base is"):
        train(asked.model_copy(update={"steps": 4}), directory)


def test_an_adapter_learns_offline_from_the_log_of_another_run(run: RunDirectory, model: Path, tmp_path: Path) -> None:
    asked = asked_for(
        model, steps=3, run={"mode": "offline", "experience": str(run.experience)}, sampler={"mode": "offline"},
        evaluation={"every": 3, "prompts": 4},
    )  # fmt: skip
    events, directory = ran(asked, tmp_path / "offline")
    assert [event["kind"] for event in events].count(EventKind.STEP) == 3
    manifest = json.loads((find_checkpoint(directory.path) / "manifest.json").read_text())
    assert manifest["adapter"]["rank"] == 4 and Probe.from_json(manifest["extras"]["probe"])
    export(directory.path, tmp_path / "adapter")
