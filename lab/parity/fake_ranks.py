"""Walk a training step at the real shapes of large models on fake ranks, and compare its memory with the device plan.

    python -m lab.parity.fake_ranks                            minutes; writes rows gpu.1.*
    python -m lab.parity.fake_ranks --case qwen3-8b.8.8k       one case, shown and not recorded

Fake tensors have shapes and no data; a fake process group has ranks and no other processes. So one CPU process goes
through everything that one of 32 GPUs would: slices, forward, backward, update, publish, and the slices of a
checkpoint. torch's memory tracker counts the bytes. The device is `cpu`, because a torch without CUDA refuses modules
on `cuda` even if they are fake. Attention is a stand-in that keeps what flex_attention keeps.
"""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from lab.figures import ROOT, Figure, command_parser, record
from offbeat.config import Config, parse
from offbeat.objective import logprobs
from offbeat.placement.memory import rank_memory
from offbeat.placement.shape import ModelShape
from offbeat.trainer.forward import UNLIMITED, ModelInputs, PolicyModel
from offbeat.trainer.fsdp import (
    Ranks,
    in_first_replica,
    named_tensors,
    own_rows,
    serving_state,
    shard,
    sum_gradients,
)
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings

MODELS = ROOT / "tests" / "placement" / "models"
TOLERANCE = 0.15
PROMPT = 512


@dataclass(frozen=True)
class Case:
    """A model on so many ranks: `replicas` copies, each in `shards` slices."""

    model: str
    replicas: int
    shards: int
    tokens: int
    recompute: bool
    reduce_once: bool = False

    @property
    def name(self) -> str:
        once = ".once" if self.reduce_once else ""
        return f"{self.model}.{self.replicas * self.shards}.{self.tokens // 1024}k{once}"

    @property
    def config(self) -> Config:
        ranks = self.replicas * self.shards
        return parse(
            {
                "run": {"place": "ray"} if ranks > 1 else {},
                "trainer": {"ranks": ranks, "token_budget": self.tokens, "checkpoint_activations": self.recompute},
                "sampling": {"max_tokens": 1024},
            }
        )

    @property
    def model_config(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((MODELS / f"{self.model}.json").read_text(encoding="utf-8"))
        return content


CASES = [
    Case("qwen2.5-0.5b", 1, 1, 8192, recompute=False),
    Case("qwen2.5-0.5b", 1, 8, 8192, recompute=False),
    Case("qwen3-8b", 1, 8, 8192, recompute=True),
    Case("qwen3-8b", 1, 8, 8192, recompute=True, reduce_once=True),
    Case("qwen3-8b", 4, 8, 16384, recompute=True),
    Case("qwen3-32b", 1, 32, 8192, recompute=True),
    Case("qwen3-32b", 1, 32, 34816, recompute=True),
]


@dataclass(frozen=True)
class Walk:
    """What a step on a fake rank showed."""

    peak: int
    """Bytes."""
    by_kind: dict[str, int]
    published: dict[str, list[int]]
    """Shapes of the published tensors, by name."""


class PeakTracker(MemTracker):
    """torch's tracker without its statistics of each module, which cost time in proportion to modules × operations."""

    def _update_peak_stats(self, state: object) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            if snapshot["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = deepcopy(snapshot)


class _KeepsLikeFlex(torch.autograd.Function):
    """Keeps queries, keys, values, output and log-sum-exp, as flex_attention does; computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)  # flex computes the row sums of gradient × output first
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _stand_in(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **kwargs: object
) -> tuple[Tensor, None]:
    return _KeepsLikeFlex.apply(query, key, value).transpose(1, 2).contiguous(), None  # type: ignore[no-untyped-call]


AttentionInterface.register("keeps_like_flex", _stand_in)
AttentionMaskInterface.register("keeps_like_flex", sdpa_mask)


def walk(case: Case, rank: int = 0) -> Walk:
    """Take one step of two micro-batches on a fake rank and publish. The process can do this once."""
    mesh = _join_fake_ranks(case, rank)
    ranks = Ranks(rank, case.replicas * case.shards, reduce="once" if case.reduce_once else "scatter")
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy_model = _policy_model(case, mesh)
        optimizer = MasterAdamW(policy_model, OptimizerSettings())
        tracker = PeakTracker()
        tracker.track_external(policy_model, optimizer._adamw, *optimizer.tensors().values())
        with tracker, _uncounted_propagation(), _head_of_a_gpu():
            for last in (False, True):
                tracker.reset_mod_stats()
                sum_gradients(policy_model, ranks, last=last)
                _forward_backward(policy_model, case.tokens)
            optimizer.update(0, norm=1.0)
            published = {name: list(tensor.shape) for name, tensor in serving_state(policy_model, torch.bfloat16)}
        [snapshot] = tracker.get_tracker_snapshot("peak").values()
    kinds = {getattr(kind, "value", str(kind)): int(size) for kind, size in snapshot.items() if size}
    return Walk(kinds.pop("Total"), kinds, published)


@contextmanager
def _head_of_a_gpu() -> Iterator[None]:
    """Let the output head work as on a GPU: all rows at once, and logits computed again in the backward pass."""
    with patch.object(logprobs, "TILE", UNLIMITED), patch.object(PolicyModel, "keeps_logits", False):
        yield


@contextmanager
def _uncounted_propagation() -> Iterator[None]:
    """Keep out of the count the tensors of global shape with which DTensor works out the layout of a result."""
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(self: ShardingPropagator, *args: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
        yield


def _join_fake_ranks(case: Case, rank: int) -> Any:
    size = case.replicas * case.shards
    if size == 1:
        return None
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    # The mesh reads data, so it is made outside FakeTensorMode.
    if case.replicas > 1:
        return init_device_mesh("cpu", (case.replicas, case.shards), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (case.shards,))


def _policy_model(case: Case, mesh: Any) -> PolicyModel:
    dtype = torch.bfloat16 if mesh is None else torch.float32
    config = AutoConfig.for_model(**case.model_config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="keeps_like_flex")
    policy_model = PolicyModel(model, checkpoint_activations=case.recompute)
    if mesh is not None:
        shard(policy_model, compute=torch.bfloat16, mesh=mesh)
    return policy_model


def _forward_backward(policy_model: PolicyModel, tokens: int) -> None:
    predicted = tokens - PROMPT
    inputs = ModelInputs(
        torch.zeros(1, tokens, dtype=torch.long),
        None,
        None,
        torch.arange(predicted) + PROMPT - 1,
        torch.zeros(predicted, dtype=torch.long),
    )
    policy_model(inputs).logprobs.sum().backward()


def slices(case: Case) -> tuple[int, int]:
    """Return how many tensors of a checkpoint have each row on exactly one rank that writes it, and how many there are.

    Every rank is visited in turn.
    """
    forked = multiprocessing.get_context("fork")  # a process has one fake process group; its imports are inherited
    with forked.Pool(1, maxtasksperchild=1) as pool:
        ranks = pool.starmap(_slices_of_rank, [(case, rank) for rank in range(case.replicas * case.shards)], 1)
    exact = 0
    for name, (length, _) in ranks[0].items():
        parts = sorted(part for rank in ranks for part in rank[name][1])
        exact += [0, *(end for _, end in parts)] == [*(start for start, _ in parts), length]
    return exact, len(ranks[0])


def _slices_of_rank(case: Case, rank: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Return the length of each tensor, and the rows that this rank writes."""
    mesh = _join_fake_ranks(case, rank)
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, tensor in named_tensors(_policy_model(case, mesh)):
            start, rows = own_rows(name, tensor)
            writes = in_first_replica(tensor) and len(rows) > 0
            found[name] = (len(tensor), [(start, start + len(rows))] if writes else [])
    return found


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="one case, shown and not recorded")
    arguments = parser.parse_args()
    if arguments.case:
        case = next(one for one in CASES if one.name == arguments.case)
        print(json.dumps(asdict(walk(case))))
        return
    held = [record(compare(case)) for case in CASES]
    held.append(record(layouts([CASES[1], CASES[2], CASES[4], CASES[5]])))
    sys.exit(0 if all(held) else 1)


def walk_in_own_process(case: Case) -> Walk:
    """Walk a case in a process of its own: a process has one fake process group."""
    command = [sys.executable, "-m", "lab.parity.fake_ranks", "--case", case.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return Walk(**json.loads(done.stdout.splitlines()[-1]))


def compare(case: Case) -> Figure:
    """Compare the peak of a walk with the estimate of the device plan."""
    found = walk_in_own_process(case)
    estimate = rank_memory(
        case.config, ModelShape.from_config(case.model_config), shards=case.shards, reduce_once=case.reduce_once
    )
    ratio = estimate.peak / found.peak
    shown = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in found.by_kind.items())
    terms = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in estimate.terms.items())
    return Figure(
        f"gpu.1.{case.name.replace('.', '-')}",
        f"estimated / tracked peak bytes of a rank: {case.model} on {case.replicas} × {case.shards} ranks, "
        f"{case.tokens} tokens",
        "0.85 to 1.15",
        round(ratio, 3),
        "ratio",
        abs(ratio - 1) <= TOLERANCE,
        1,
        f"tracked {found.peak / 2**30:.2f} GiB ({shown}); estimated {estimate.peak / 2**30:.2f} GiB ({terms})",
    )


def layouts(cases: list[Case]) -> Figure:
    """Check the slices of checkpoints over all ranks."""
    results = [slices(case) for case in cases]
    exact, total = (sum(column) for column in zip(*results, strict=True))
    return Figure(
        "gpu.1.slices",
        "tensors of a checkpoint whose rows are each written by exactly one rank",
        f"{total} of {total}",
        exact,
        "tensors",
        exact == total,
        total,
        "all ranks of " + ", ".join(f"{case.model} on {case.replicas} × {case.shards}" for case in cases),
    )


if __name__ == "__main__":
    main()
