"""Compute the gradient of the same batches with TRL's GRPO loss and with ours, and compare.

    python -m lab.parity.trl_parity    about a minute; writes rows foundation.4.*

Per preset and seed, `trl.GRPOTrainer` itself pads a scripted batch, scores it, computes the advantages, counts the
tokens and records old log-probs, which we then move so that ratios spread. It computes its loss and gradient. We take
the ids, masks and old log-probs and the raw rewards, and use our own code: `assign_credit`, `token_stats`,
`policy_loss`, backward. The comparison is over the gradient of all parameters, ‖g_trl - g_ours‖ / ‖g_trl‖, once whole
and once as two unequal micro-batches.

TRL's log-probs are float32 for every model dtype, so everything is. One process, no accumulation in TRL, no KL term.

Two differences are intended, and the last rows of the table measure them:
- Our dapo excludes groups without contrast from the token count; TRL counts them. So in its strict row dapo gets only
  groups with contrast, while the other presets get both kinds.
- We do not count a completion without a score; TRL counts it, with advantage 0.
In both cases the gradients are parallel, and ours is longer by TRL's count over ours. Rescaled by it, they must agree.
"""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer

from lab.figures import Figure, command_parser, record
from lab.fixtures.trl_trainer import scripted_trainer
from offbeat.objective.credit import assign_credit
from offbeat.objective.logprobs import token_stats
from offbeat.objective.losses import Streams, counts, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Aggregate, Importance, Objective
from offbeat.types import UNKNOWN

GOAL = 1e-5
SEEDS = range(5)
B, G, VOCABULARY, TEMPERATURE = 6, 8, 96, 0.8
LONGEST, LENGTH_LIMIT = 48, 64  # different, so that dividing by the wrong one shows
PAD, EOS = 0, 1
SPREAD = 2.5
"""Log-ratios are uniform within ± this: beyond every band, many beyond CISPO's cap of 5. The largest ratio is 12, so
that no few tokens dominate the gradient."""

TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group", "epsilon": 0.2},
    "dr-grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "scale_rewards": "group", "epsilon_high": 5.0},
}

STRICT = [(preset, 0 if preset == "dapo" else 2, 0) for preset in TRL_SETTINGS]
"""Preset, groups without contrast, groups in which one completion is unscored."""
INTENDED = [("dapo", 2, 0), ("grpo", 2, 2)]


class Comparison(NamedTuple):
    whole: float
    """‖g_trl - g_ours‖ / ‖g_trl‖"""
    split: float
    """The same with our gradient summed over two micro-batches."""
    rescaled: float
    """The same with our gradient times our count over TRL's: equal to `whole` if both counts are equal."""
    clipped_down: float
    """Share of tokens with A < 0 whose gradient the clip stops or, for cispo, whose weight it caps."""
    clipped_up: float


def draw(seed: int, no_contrast: int, unscored: int) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """Return prompts and completions of random tokens and lengths, and rewards [B, G], NaN for a missing score."""
    rng = torch.Generator().manual_seed(seed)

    def tokens(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (), generator=rng))
        return [int(token) for token in torch.randint(2, VOCABULARY, (length,), generator=rng)]

    prompts = [prompt for prompt in (tokens(2, 9) for _ in range(B)) for _ in range(G)]
    completions = [[*tokens(0, LONGEST - 1), EOS] for _ in prompts]
    rewards_BG = torch.randint(0, 11, (B, G), generator=rng) / 10
    rewards_BG[0] = torch.eye(G)[seed % G]  # one right answer among eight: the largest advantage there is
    for group in range(1, 1 + no_contrast):
        rewards_BG[group] = group % 2
    rewards_BG[B - unscored :, seed % G] = torch.nan
    return prompts, completions, rewards_BG


def tiny_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # The default initializer_range, 0.02, would make all tokens about equally likely.
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.1, **shape))


def trl_trainer(preset: str, model: LlamaForCausalLM, scripted: dict[str, Any], directory: str) -> GRPOTrainer:
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    trainer = scripted_trainer(
        model,
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        scripted,
        directory,
        per_device_train_batch_size=B * G,
        gradient_accumulation_steps=1,
        num_generations=G,
        num_iterations=2,  # with 1, TRL records no old log-probs and takes the current ones
        max_completion_length=LENGTH_LIMIT,
        temperature=TEMPERATURE,
        bf16=False,
        **TRL_SETTINGS[preset],
    )
    trainer.current_gradient_accumulation_steps = 1  # the training loop sets it, which does not run here
    return trainer


def take_gradient(model: LlamaForCausalLM) -> Tensor:
    """Return all gradients as one vector and clear them in the model."""
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    assert gradient.numel() == model.num_parameters() and gradient.isfinite().all(), (
        "a gradient is missing or not finite"
    )
    model.zero_grad()
    return gradient


def our_backward(
    objective: Objective, model: LlamaForCausalLM, batch: dict[str, Tensor], rewards_BG: Tensor, parts: Sequence[slice]
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate gradients in the model by micro-batch. Return mask, clipped tokens and advantages [N, 1]."""
    ids_NS = torch.cat([batch["prompt_ids"], batch["completion_ids"]], -1)
    attention_NS = torch.cat([batch["prompt_mask"], batch["completion_mask"]], -1)
    completions_NT, T = batch["completion_ids"], batch["completion_ids"].shape[-1]
    lengths_BG = batch["completion_mask"].sum(-1).view(B, G)
    credit = assign_credit(objective, rewards_BG, ~rewards_BG.isnan(), lengths_BG, group_seeds=range(B))
    mask_NT = batch["completion_mask"].bool() & credit.trained_BG.flatten()[:, None]
    clipped_NT = torch.zeros_like(mask_NT)
    for rows in parts:
        hidden_NTH = model.model(ids_NS[rows], attention_mask=attention_NS[rows]).last_hidden_state[:, -T - 1 : -1]
        stats = token_stats(hidden_NTH, model.lm_head.weight, completions_NT[rows], temperature=TEMPERATURE)
        streams = Streams(
            policy_NT=stats.logprobs,
            behavior_NT=batch["old_per_token_logps"][rows],
            proximal_NT=UNKNOWN,
            reference_NT=UNKNOWN,
            advantages_N=credit.advantages_BG.flatten()[rows],
            weights_N=credit.weights_BG.flatten()[rows],
            mask_NT=mask_NT[rows],
        )
        loss = policy_loss(objective, streams, counts(mask_NT), length_limit=LENGTH_LIMIT)
        torch.autograd.backward(loss.total)
        assert isinstance(objective.weight, Importance) and loss.log_ratios_NT is not None
        clipped_NT[rows] = mask_NT[rows] & (~loss.passed_NT | (loss.log_ratios_NT.exp() > objective.weight.cap))
    return mask_NT, clipped_NT, credit.advantages_BG.flatten()[:, None]


def compare(preset: str, seed: int, no_contrast: int, unscored: int) -> Comparison:
    objective, model = PRESETS[preset].objective, tiny_model(seed)
    prompts, completions, rewards_BG = draw(seed, no_contrast, unscored)
    scripted = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
    grades = [None if reward.isnan() else float(reward) for reward in rewards_BG.flatten()]
    with tempfile.TemporaryDirectory() as directory:
        trainer = trl_trainer(preset, model, scripted, directory)
    model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "w2", "grade": grade} for grade in grades])
    rng = torch.Generator().manual_seed(seed)
    batch["old_per_token_logps"] += SPREAD * (2 * torch.rand(batch["completion_ids"].shape, generator=rng) - 1)

    trainer.compute_loss(model, batch).backward()
    g_trl = take_gradient(model)
    mask_NT, clipped_NT, advantages_N1 = our_backward(objective, model, batch, rewards_BG, [slice(None)])
    g_ours = take_gradient(model)
    cut = 3 * G + 1  # unequal, and across a group
    our_backward(objective, model, batch, rewards_BG, [slice(0, cut), slice(cut, None)])
    g_split = take_gradient(model)

    count = "tokens" if objective.aggregate is Aggregate.TOKEN_MEAN else "sequences"
    rescale = getattr(counts(mask_NT), count) / getattr(counts(batch["completion_mask"].bool()), count)
    whole, split, rescaled = (float((g_trl - g).norm() / g_trl.norm()) for g in (g_ours, g_split, rescale * g_ours))
    down, up = (float((clipped_NT & side).sum() / mask_NT.sum()) for side in (advantages_N1 < 0, advantages_N1 > 0))
    return Comparison(whole, split, rescaled, down, up)


def table_row(preset: str, no_contrast: int, unscored: int) -> tuple[float, float, str]:
    """Print a row. Return the largest difference, the one after rescaling, and the share of clipped tokens."""
    runs = [compare(preset, seed, no_contrast, unscored) for seed in SEEDS]
    whole, split, rescaled, _, _ = (max(values) for values in zip(*runs, strict=True))
    down, up = (sum(values) / len(runs) for values in list(zip(*runs, strict=True))[3:])
    if not all(0.1 <= run.clipped_down + run.clipped_up <= 0.6 for run in runs):
        raise SystemExit(f"{preset}: {down + up:.0%} of the tokens are clipped, not 10 % to 60 %: change SPREAD")
    differences = f"{whole:>13.1e}{split:>13.1e}{rescaled:>13.1e}"
    print(f"{preset:<9}{no_contrast:>7}{unscored:>13}{differences}{down:>10.0%}{up:>10.0%}")
    return max(whole, split), rescaled, f"{down + up:.0%}"


def main() -> int:
    command_parser(__doc__).parse_args()
    torch.set_num_threads(1)  # tensors are tiny: more threads only wait for each other and change the last digits
    print(f"TRL {trl.__version__}, float32, {B} groups of {G}; worst difference and mean share of {len(SEEDS)} seeds")
    print("           equal  groups with                    as two                   clipped tokens")
    print("preset    groups     unscored   difference        parts     rescaled     A < 0     A > 0")
    figures = []
    for case in STRICT:
        worst, _, clipped = table_row(*case)
        figures.append(
            Figure(
                id=f"foundation.4.{case[0]}",
                what=f"gradient against TRL {trl.__version__}'s, {case[0]}",
                goal="<= 1e-5",
                measured=float(f"{worst:.1e}"),
                unit="relative difference",
                holds=worst <= GOAL,
                n=len(SEEDS),
                note=f"worst seed, whole or as two micro-batches; float32; {clipped} of tokens clipped",
            )
        )
    print("intended differences:")
    rescaled = [table_row(*case)[1] for case in INTENDED]
    return 0 if record(*figures) and max(rescaled) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
