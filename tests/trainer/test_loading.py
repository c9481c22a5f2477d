"""A sharded start reads the weights that a dense load gives, row by row, and refuses files that do not fit."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from offbeat.errors import ModelUnreadable, UnsupportedModel
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, named_tensors, own_rows
from offbeat.trainer.loading import PIECE_BYTES, StoredTensor, allocate, empty_model, fill, load_policy_model
from offbeat.types import Json
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import small_model

WEIGHTS = "model.safetensors"
TINY = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def load(directory: Path) -> PolicyModel:
    """Load as a rank does, without sharding: this rank's rows are all rows."""
    policy_model = PolicyModel(empty_model(directory))
    allocate(policy_model, torch.device("cpu"))
    fill(policy_model, directory)
    return policy_model


def assert_equal_to_dense(directory: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded = load(directory).model
    ours, theirs = loaded.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in dense.named_buffers())


def rewrite(directory: Path, weights: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / WEIGHTS, {"format": "pt"})


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    small_model(tied=True, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    small_model(tied=False, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_tied_and_untied_models_equal_a_dense_load(tmp_path: Path) -> None:
    for is_tied in (True, False):
        small_model(tied=is_tied, dtype=torch.bfloat16).save_pretrained(tmp_path / str(is_tied))
        assert_equal_to_dense(tmp_path / str(is_tied))


def test_a_model_in_several_files_equals_a_dense_load(tmp_path: Path) -> None:
    small_model(tied=False).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_equal_to_dense(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt_neox", "gpt2"])
def test_other_architectures_equal_a_dense_load(tmp_path: Path, kind: str) -> None:
    sizes = {**TINY, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert_equal_to_dense(tmp_path)


def test_weights_of_the_bare_body_get_their_prefix(tied: Path) -> None:
    rewrite(tied, {name.removeprefix("model."): tensor for name, tensor in load_file(tied / WEIGHTS).items()})
    assert_equal_to_dense(tied)


def test_a_tied_head_may_be_stored_alone_or_twice(tied: Path) -> None:
    weights = load_file(tied / WEIGHTS)
    embedding = weights.pop("model.embed_tokens.weight")
    rewrite(tied, {**weights, "lm_head.weight": embedding})
    assert_equal_to_dense(tied)
    rewrite(tied, {**weights, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone()})
    assert_equal_to_dense(tied)
    rewrite(tied, {**weights, "lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding})
    with pytest.raises(ModelUnreadable, match="tie_word_embeddings"):
        load(tied)


def test_missing_unexpected_and_misshapen_tensors_are_named(untied: Path) -> None:
    weights = load_file(untied / WEIGHTS)
    rewrite(untied, {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
    with pytest.raises(ModelUnreadable, match=r"lack lm_head\.weight"):
        load(untied)
    rewrite(untied, {**weights, "vision.weight": torch.zeros(2)})
    with pytest.raises(ModelUnreadable, match=r"also hold vision\.weight"):
        load(untied)
    rewrite(untied, {**weights, "lm_head.weight": torch.zeros(7, 32)})
    with pytest.raises(ModelUnreadable, match=r"lm_head\.weight is \[7, 32\] .* and \[50, 32\]"):
        load(untied)


def test_rotary_frequencies_of_early_llama_files_are_ignored(untied: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(untied, {**load_file(untied / WEIGHTS), **extra})
    assert_equal_to_dense(untied)


def test_quantized_and_truncated_files_are_refused(untied: Path) -> None:
    weights = load_file(untied / WEIGHTS)
    rewrite(untied, {**weights, "lm_head.weight": torch.zeros(50, 32, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match="quantized"):
        load(untied)
    rewrite(untied, weights)
    whole = (untied / WEIGHTS).read_bytes()
    (untied / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(ModelUnreadable, match="is damaged: it has"):
        load(untied)
    (untied / WEIGHTS).write_bytes(whole[:40])
    with pytest.raises(ModelUnreadable, match="not a safetensors file"):
        load(untied)


def test_rows_are_read_across_pieces(tmp_path: Path) -> None:
    numbers = torch.arange(3 * PIECE_BYTES // 8 + 5, dtype=torch.float32).reshape(-1, 1)
    file = tmp_path / "raw"
    file.write_bytes(b"12345" + numbers.numpy().tobytes())
    found = torch.empty(len(numbers) - 3, 1)
    StoredTensor(file, torch.float32, tuple(numbers.shape), 5).read(3, found, bytearray(PIECE_BYTES))
    assert torch.equal(found, numbers[3:])


def test_several_parts_make_no_parameter_outside_the_meta_device(untied: Path) -> None:
    model = empty_model(untied)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert all(not parameter.is_meta for parameter in LlamaForCausalLM(LlamaConfig(**TINY)).parameters())


def test_rotary_frequencies_stay_in_float32_as_on_several_ranks_and_in_engines(tied: Path) -> None:
    loaded = load_policy_model(tied, Ranks(), compute=torch.bfloat16).model
    assert all(parameter.dtype == torch.bfloat16 for parameter in loaded.parameters())
    expected, found = dict(empty_model(tied).named_buffers()), dict(loaded.named_buffers())
    assert found and all(torch.equal(found[name], buffer) for name, buffer in expected.items())
    assert all(buffer.dtype == torch.float32 for buffer in found.values())


def sharded_start(ranks: Ranks, directories: list[str]) -> Json:
    """Compare every slice with the rows of a dense load; return how many are equal, and how many there are."""
    torch.set_num_threads(1)
    equal, total = 0, 0
    for directory in directories:
        dense = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
        policy_model = load_policy_model(Path(directory), ranks, compute=torch.bfloat16)
        head, embedding = policy_model.model.get_output_embeddings(), policy_model.model.get_input_embeddings()
        assert (head.weight is embedding.weight) == policy_model.model.config.tie_word_embeddings
        for name, tensor in named_tensors(policy_model):
            start, rows = own_rows(name, tensor)
            equal += torch.equal(rows, dense[name][start : start + len(rows)])
            total += 1
        logits = policy_model.logits(torch.tensor([[1, 2, 3]]))
        assert logits.isfinite().all()
    return [equal, total]


@pytest.mark.engine
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_holds_the_rows_of_a_dense_load(tmp_path: Path, size: int) -> None:
    places = []
    for is_tied in (True, False):
        places.append(str(tmp_path / str(is_tied)))
        small_model(tied=is_tied, dtype=torch.bfloat16).save_pretrained(places[-1])
    for rank in run_ranks(sharded_start, size, (places,)):
        assert isinstance(rank, list) and rank[0] == rank[1] > 20


def test_a_model_that_merges_tensors_while_it_loads_is_refused_on_several_ranks(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**TINY, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_key_value_heads=1)).save_pretrained(tmp_path)
    assert "qwen3_moe" in json.loads((tmp_path / "config.json").read_text())["model_type"]
    with pytest.raises(UnsupportedModel, match=r"merges tensors of its files .* trainer\.ranks = 1"):
        load(tmp_path)
