"""Compare packed rows in the compiled flex_attention with plain rows, and count graphs, mask bytes and the head's time.

    python -m lab.parity.flex            10 minutes; writes rows gpu.3.*
    python -m lab.parity.flex --short    a few layouts and small sizes; records nothing

On CPU torch compiles the forward pass of flex_attention only. Graphs with gradients are counted with the backend
aot_eager, after torch's check that refuses them on CPU is taken out.
"""

import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lab.figures import Figure, command_parser, machine, report
from offbeat.objective.logprobs import token_stats
from offbeat.trainer import flex
from offbeat.trainer.batch import MicroBatch, build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, to_model_inputs
from offbeat.types import UNKNOWN, Completion, Group, Prompt

CPU = torch.device("cpu")
VOCABULARY = 64


def small_policy() -> PolicyModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    return PolicyModel(LlamaForCausalLM(config), packed=True)


def make_group(name: str, rng: np.random.Generator, prompt: int, sizes: list[int]) -> Group:
    tokens, *answers = (rng.integers(0, VOCABULARY, size, dtype=np.int32) for size in (prompt, *sizes))
    completions = (Completion(f"{name}/{i}", answer, UNKNOWN) for i, answer in enumerate(answers))
    return Group(name, Prompt(name, tokens, "made-up"), tuple(completions))


def some_layout(rng: np.random.Generator, longest: int) -> list[Group]:
    """Return one to five groups of one to eight completions, from one token to `longest`, mostly short."""
    size = int(rng.integers(2, longest + 1))
    return [
        make_group(
            f"g{i}", rng, int(rng.integers(1, size)), rng.integers(1, size, int(rng.integers(1, 9))).tolist()
        )
        for i in range(int(rng.integers(1, 6)))
    ]  # fmt: skip


def pack(groups: list[Group]) -> MicroBatch:
    [plan] = plan_micro_batches(groups, 1 << 40, shared_prefix=True, packed=True)
    return build_micro_batch(plan, groups)


@torch.no_grad()
def difference(policy_model: PolicyModel, groups: list[Group]) -> float:
    """Return the largest difference of a log-prob between the packed row and one plain row for each completion."""
    micro = pack(groups)
    policy_model.model.set_attn_implementation(flex.NAME)
    packed = policy_model(to_model_inputs(micro, shared_prefix=True, device=CPU, fused=True)).logprobs
    policy_model.model.set_attn_implementation("sdpa")
    found: dict[tuple[int, int], Tensor] = {}
    for plan in plan_micro_batches(groups, 1 << 13, shared_prefix=False):
        plain = policy_model(to_model_inputs(build_micro_batch(plan, groups), shared_prefix=False, device=CPU))
        sizes = [len(groups[g].completions[c].token_ids) for g, c in plan.completions]
        found |= dict(zip(plan.completions, plain.logprobs.split(sizes), strict=True))
    return float((packed - torch.cat([found[one] for one in micro.plan.completions])).abs().max())


def logprobs(layouts: int) -> Figure:
    """Row gpu.3.logprobs."""
    policy_model, rng = small_policy(), np.random.default_rng(0)
    differences = [difference(policy_model, some_layout(rng, 300)) for _ in range(layouts)]
    return Figure(
        "gpu.3.logprobs",
        "largest difference of log-probs, packed rows in flex_attention compiled on CPU against plain rows, float32",
        "<= 1e-5",
        float(f"{max(differences):.2g}"),
        "nats",
        max(differences) <= 1e-5,
        layouts,
        f"random layouts of 1 to 5 groups, 1 to 8 completions, prompts and completions up to 300 tokens; "
        f"median of the layouts' largest differences {median(differences):.1g}",
    )


@contextmanager
def gradients_on_cpu() -> Iterator[None]:
    """Let flex_attention accept inputs with gradients on CPU: without inductor, its backward pass works there."""
    validate = torch_flex._validate_device
    torch_flex._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        torch_flex._validate_device = validate


def graphs(batches: int) -> Figure:
    """Row gpu.3.graphs. The batches of the forward mode are new ones: the graphs of `logprobs` count as well."""
    rng, policy_model = np.random.default_rng(1), small_policy()
    for _ in range(batches):
        difference(policy_model, some_layout(rng, 300))
    with_gradient = flex.FusedAttention("aot_eager")
    lengths = set()
    with gradients_on_cpu():
        for _ in range(batches):
            micro = pack(some_layout(rng, 60))
            mask = flex.packed_mask(micro, CPU, fused=True).blocks
            shapes = [(1, micro.token_ids_RL.size, heads, 16) for heads in (4, 2, 2)]
            query, key, value = (torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)
            with_gradient(query, key, value, mask).sum().backward()
            lengths.add(micro.token_ids_RL.size)
    counts = flex.graphs_compiled() | dict(with_gradient.graphs)
    return Figure(
        "gpu.3.graphs",
        f"graphs that torch compiles for one model over {batches} batches of varying shapes, the mode with more",
        "<= 2",
        max(counts.values()),
        "graphs",
        max(counts.values()) <= 2,
        batches,
        "; ".join(f"{name}: {count}" for name, count in counts.items())
        + f"; with gradients, rows of {len(lengths)} different lengths",
    )


def mask_bytes(groups: list[Group]) -> tuple[int, int]:
    """Return the tokens of the packed row, and the bytes at the peak of making its mask as for a GPU."""
    micro = pack(groups)
    tracemalloc.start()
    keys, lists = flex.find_blocks(micro.segment_ids_RL[0], micro.position_ids_RL[0])
    mask = flex.to_block_mask(keys, lists, torch.device("meta"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    on_device = 3 * 4 * len(keys.own_L) + sum(one.nbytes for one in mask.as_tuple() if isinstance(one, Tensor))
    return micro.token_ids_RL.size, peak + on_device


def mask() -> Figure:
    """Row gpu.3.mask."""
    rng = np.random.default_rng(0)
    mask_bytes([make_group("first", rng, 8, [8])])  # imports, which would count
    sizes = dict(
        mask_bytes([make_group(f"g{i}", rng, 256, [448] * 4) for i in range(count)]) for count in (4, 8, 16)
    )  # fmt: skip
    length, single = mask_bytes([make_group("one", rng, 256, [32_512])])
    ratio = sizes[32_768] / sizes[8_192]
    listed = ", ".join(f"{size / 1e6:.2f} MB at {tokens:,}" for tokens, size in sizes.items())
    return Figure(
        "gpu.3.mask",
        "bytes at the peak of making a block mask, 32,768 tokens over 8,192, groups of 2,048 tokens",
        "<= 4.4",
        round(ratio, 2),
        "ratio",
        ratio <= 4.4,
        len(sizes),
        f"host and device together: {listed}; one sequence of {length:,} tokens: {single / 1e6:.1f} MB, where a dense "
        f"mask of 4 bytes has {4 * length**2 / 1e9:.1f} GB",
    )


def backward_by_tokens(hidden: Tensor, head: Tensor, ids: Tensor, weights: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The gradients of Σ weight · log-prob, added to a float32 gradient of the head for every chunk of tokens."""
    grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
    for start in range(0, len(ids), chunk):
        rows = slice(start, start + chunk)
        log_p = torch.log_softmax((hidden[rows] @ head.T).float(), -1)
        p = log_p.exp()
        grad = log_p.zero_()
        grad -= p.mul_(weights[rows, None])
        grad.scatter_add_(-1, ids[rows, None], weights[rows, None])
        grad_logits = grad.to(hidden.dtype)
        torch.mm(grad_logits, head, out=grad_hidden[rows])
        if hidden.dtype == torch.float32:
            grad_head.addmm_(grad_logits.T, hidden[rows])
        else:
            grad_head += grad_logits.T @ hidden[rows]
    return grad_hidden, grad_head.to(head.dtype)


def head_ratios(dtype: torch.dtype, tokens: int, vocabulary: int, turns: int) -> list[float]:
    """Return the time of the head's backward pass over that of `backward_by_tokens`, turn by turn."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 576, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(vocabulary, 576, generator=generator) / 24).to(dtype).requires_grad_()
    ids, weights = torch.randint(0, vocabulary, (tokens,), generator=generator), torch.randn(tokens)
    ratios = []
    for turn in range(turns + 1):
        loss = (token_stats(hidden, head, ids, chunk_tokens=512).logprobs * weights).sum()
        started = time.perf_counter()
        found = torch.autograd.grad(loss, (hidden, head))
        between = time.perf_counter()
        expected = backward_by_tokens(hidden.detach(), head.detach(), ids, weights, 512)
        ended = time.perf_counter()
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).float().norm()) <= 0.02 * float(theirs.float().norm())
        if turn:  # the first one warms up
            ratios.append((between - started) / (ended - between))
    return ratios


def head(short: bool) -> Figure:
    """Row gpu.3.head."""
    vocabulary, tokens, turns = (4096, 1024, 3) if short else (49_152, 2048, 7)
    found = {dtype: head_ratios(dtype, tokens, vocabulary, turns) for dtype in (torch.bfloat16, torch.float32)}
    worst = max(median(ratios) for ratios in found.values())
    spread = "; ".join(
        f"{dtype}: median {median(one):.2f}, {min(one):.2f} to {max(one):.2f}" for dtype, one in found.items()
    )
    return Figure(
        "gpu.3.head",
        "time of the head's backward pass over one that adds to the whole head's gradient for every chunk of tokens",
        "<= 1",
        round(worst, 2),
        "ratio",
        worst <= 1,
        turns,
        f"vocabulary {vocabulary:,}, {tokens:,} tokens, hidden 576, one thread; {spread}; {machine()}",
    )


def main(short: bool) -> bool:
    torch.set_num_threads(1)
    holds = [  # each row is written as soon as it is measured
        report(short, logprobs(5 if short else 200)),
        report(short, graphs(5 if short else 100)),
        report(short, mask()),
        report(short, head(short)),
    ]
    return all(holds)


if __name__ == "__main__":
    sys.exit(
        not main(command_parser(__doc__, short="a few layouts and small sizes; record nothing").parse_args().short)
    )
