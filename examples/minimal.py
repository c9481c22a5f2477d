"""Off-policy group-relative RL on one page: Algorithm 1 of Mroueh et al. (arXiv 2505.22257) in one process, on CPU.

The script makes a tiny Llama and pre-trains it on one-digit sums, most of them wrong. Then the model learns from its
own answers, compared in groups, while the policy that generates them lags behind the policy that learns:

    python examples/minimal.py                        v = 1: publish after every step, answers are always fresh
    python examples/minimal.py --sync-every 10        v = 10: answers come from weights up to 9 steps behind
    python examples/minimal.py --updates-per-batch 4  i = 4: every batch of answers is used four times

A prompt is four characters, "7+8=". A completion has at most three; the reward is 1 for exactly "15.", otherwise 0.
Shapes: B prompts, G completions of each, N = B·G, P prompt tokens, T completion tokens, H hidden.
"""

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from offbeat.objective.bound import effective_sample_size, total_variation
from offbeat.objective.credit import Credit, assign_credit
from offbeat.objective.gates import gate_batch
from offbeat.objective.logprobs import token_stats
from offbeat.objective.losses import Streams, counts, log_ratios, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need, Objective
from offbeat.seeds import derive
from offbeat.types import UNKNOWN

B, G, T = 64, 8, 3
LEARNING_RATE = 4e-4
SLIPS = 0.6  # share of wrong answers in pre-training: what RL can improve
REPORT_EVERY = 15

VOCABULARY = {character: token for token, character in enumerate("0123456789+=.")}
END = VOCABULARY["."]


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[VOCABULARY[character] for character in text] for text in texts])


# All problems fit into a table. A problem is a row number of these tensors.
PROMPTS = encode([f"{a}+{b}=" for a in range(10) for b in range(10)])
SUMS = torch.tensor([a + b for a in range(10) for b in range(10)])
ANSWERS = encode([str(number).ljust(T, ".") for number in range(100)])


@dataclass(frozen=True)
class Rollout:
    """Scored completions of some problems, with the behavior log-prob of each token."""

    problems_N: Tensor
    completions_NT: Tensor
    behavior_NT: Tensor
    mask_NT: Tensor
    """Return True up to and including the first end token; the rest is padding."""
    rewards_N: Tensor


def stream(seed: int, name: str) -> torch.Generator:
    """Return a separate random generator for each use, so that evaluating more often changes nothing else."""
    return torch.Generator().manual_seed(derive(seed, name))


def completion_logprobs(model: LlamaForCausalLM, problems_N: Tensor, completions_NT: Tensor) -> Tensor:
    """Return log π of each completion token from the hidden state before it, without full logits."""
    tokens = torch.cat([PROMPTS[problems_N], completions_NT[:, :-1]], dim=1)
    hidden_NTH = model.model(tokens).last_hidden_state[:, -T:]
    return token_stats(hidden_NTH, model.lm_head.weight, completions_NT).logprobs


def descend(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def pretrain(steps: int, seed: int) -> LlamaForCausalLM:
    """Return a model pre-trained on sums whose answers are often off by one or by ten."""
    torch.manual_seed(derive(seed, "model"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters=steps)
    randomness = stream(seed, "pretrain")
    for _ in range(steps):
        problems_N = torch.randint(len(PROMPTS), (128,), generator=randomness)
        slips_N = torch.tensor([-10, -1, 1, 10])[torch.randint(4, (128,), generator=randomness)]
        slipped_N = torch.rand(128, generator=randomness) < SLIPS
        said_N = torch.where(slipped_N, SUMS[problems_N] + slips_N, SUMS[problems_N]) % 100
        descend(model, optimizer, -completion_logprobs(model, problems_N, ANSWERS[said_N]).mean())
        schedule.step()
    return model


@torch.no_grad()
def generate(model: LlamaForCausalLM, problems_N: Tensor, randomness: torch.Generator) -> Rollout:
    """Return one scored completion of each problem, at temperature 1 without top-k or top-p.

    The log-probs kept are those sampled from. Computed again later, by other weights, they would hide the lag.
    """
    unread, cache = PROMPTS[problems_N], DynamicCache(config=model.config)
    ended_N1 = torch.zeros(len(problems_N), 1, dtype=torch.bool)
    tokens, logprobs, mask = [], [], []
    for _ in range(T):
        logprobs_NV = model(unread, past_key_values=cache).logits[:, -1].log_softmax(-1)
        next_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=randomness).masked_fill(ended_N1, END)
        tokens.append(next_N1)
        logprobs.append(logprobs_NV.gather(-1, next_N1))
        mask.append(~ended_N1)
        unread, ended_N1 = next_N1, ended_N1 | (next_N1 == END)
    completions_NT, behavior_NT, mask_NT = (torch.cat(columns, dim=1) for columns in (tokens, logprobs, mask))
    rewards_N = (completions_NT == ANSWERS[SUMS[problems_N]]).all(-1).float()
    return Rollout(problems_N, completions_NT, behavior_NT, mask_NT, rewards_N)


def pass_rate(policy: LlamaForCausalLM, seed: int) -> float:
    """Return pass@1 over all problems, 20 samples each at temperature 1: the expected reward, not the best guess."""
    problems_N = torch.arange(len(PROMPTS)).repeat_interleave(20)
    return float(generate(policy, problems_N, stream(seed, "evaluate")).rewards_N.mean())


def credit_of(objective: Objective, rollout: Rollout, seed: int, step: int) -> Credit:
    rewards_BG = rollout.rewards_N.view(B, G)
    lengths_BG = rollout.mask_NT.sum(-1).view(B, G)
    seeds_B = [derive(seed, "group", step, group) for group in range(B)]
    everything = torch.ones_like(rewards_BG, dtype=torch.bool)
    return assign_credit(objective, rewards_BG, everything, lengths_BG, group_seeds=seeds_B)


def loss_of(objective: Objective, rollout: Rollout, credit: Credit, policy_NT: Tensor, proximal_NT: Tensor) -> Tensor:
    advantages_N, weights_N, mask_NT = credit.rows(rollout.mask_NT)
    streams = Streams(
        policy_NT=policy_NT,
        behavior_NT=rollout.behavior_NT,
        proximal_NT=proximal_NT,
        reference_NT=UNKNOWN,
        advantages_N=advantages_N,
        weights_N=weights_N,
        mask_NT=mask_NT,
    )
    gate_NT = None
    if objective.needs_first_look:
        log_ratios_NT = log_ratios(policy_NT.detach(), rollout.behavior_NT, mask_NT)
        gate_NT = gate_batch(objective, log_ratios_NT, advantages_N, mask_NT, group_size=G)
    return policy_loss(objective, streams, counts(mask_NT), length_limit=T, gate_NT=gate_NT).total


def drift(rollout: Rollout, proximal_NT: Tensor) -> str:
    """Return how far the proximal policy is from the behavior policy, on the completions just trained on."""
    ratios_NT = log_ratios(proximal_NT, rollout.behavior_NT, rollout.mask_NT)
    tv = total_variation(ratios_NT.flatten(), rollout.mask_NT.flatten())
    sequence_BG = ratios_NT.sum(-1).view(B, G)
    ess = effective_sample_size(sequence_BG, torch.ones_like(sequence_BG, dtype=torch.bool)).mean()
    return f"token TV {float(tv):.3f}  ESS {float(ess):.2f}"


def train(policy: LlamaForCausalLM, args: argparse.Namespace) -> list[float]:
    """Run Algorithm 1 and return the pass rates of the policy, before the first step and at each report."""
    objective = PRESETS[args.objective].objective
    optimizer = AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    behavior, version = copy.deepcopy(policy), 0
    asking, sampling = stream(args.seed, "prompts"), stream(args.seed, "rollouts")
    rates = [pass_rate(policy, args.seed)]
    print(f"step   0  pass rate {rates[0]:.2f}")

    for step in range(1, args.steps + 1):
        lag = (step - 1) - version  # π_k has seen k = step - 1 batches
        problems_N = torch.randint(len(PROMPTS), (B,), generator=asking).repeat_interleave(G)
        rollout = generate(behavior, problems_N, sampling)
        credit = credit_of(objective, rollout, args.seed, step)

        policy_NT = completion_logprobs(policy, rollout.problems_N, rollout.completions_NT)
        proximal_NT = policy_NT.detach()  # before the first update the two are the same
        for update in range(args.updates_per_batch):
            if update > 0:
                policy_NT = completion_logprobs(policy, rollout.problems_N, rollout.completions_NT)
            descend(policy, optimizer, loss_of(objective, rollout, credit, policy_NT, proximal_NT))

        if step % REPORT_EVERY == 0 or step == args.steps:
            rates.append(pass_rate(policy, args.seed))
            reward = float(rollout.rewards_N.mean())
            where = f"step {step:3}  version {version:3}  lag {lag:2}"
            print(f"{where}  pass rate {rates[-1]:.2f}  reward {reward:.2f}  {drift(rollout, proximal_NT)}", flush=True)
        if step % args.sync_every == 0:
            behavior.load_state_dict(policy.state_dict())
            version = step
    return rates


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; give at least 1")
    return number


def main(argv: list[str] | None = None) -> list[float]:
    without_reference = sorted(n for n, p in PRESETS.items() if Need.REFERENCE not in p.objective.needs)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sync-every", type=positive, default=1, metavar="V", help="steps from one publish to the next"
    )
    parser.add_argument("--updates-per-batch", type=positive, default=1, metavar="I", help="updates on each batch")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--objective", default="rec-oneside-nois", choices=without_reference, metavar="PRESET")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pretrain-steps", type=positive, default=800)
    args = parser.parse_args(argv)

    torch.set_num_threads(1)  # a second core does not speed up matrices this small
    start = time.monotonic()
    policy = pretrain(args.pretrain_steps, args.seed)
    print(f"pre-trained in {time.monotonic() - start:.0f} s", flush=True)
    rates = train(policy, args)
    seconds, publishes = time.monotonic() - start, args.steps // args.sync_every
    print(f"pass rate {rates[0]:.2f} -> {rates[-1]:.2f} in {seconds:.0f} s, {args.steps} steps, {publishes} publishes")
    return rates


if __name__ == "__main__":
    main()
