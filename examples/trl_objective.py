"""Use any objective of offbeat in TRL's GRPOTrainer: TRL generates and scores, offbeat computes the loss.

    python examples/trl_objective.py                        10 steps on CPU with rec-oneside-nois
    python examples/trl_objective.py --preset red-weight

A tiny Llama with random weights gets a reward for every 7 it generates. Copy `ObjectiveTrainer` into your project: it
takes the arguments of GRPOTrainer and a preset. It ignores `loss_type`, `scale_rewards` and the clip settings of
GRPOConfig; `beta` is the coefficient of the KL term. Needs `pip install trl==1.16.0`.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from offbeat.config.objective import ObjectiveConfig
from offbeat.objective.credit import assign_credit
from offbeat.objective.losses import Counts, Streams, policy_loss
from offbeat.seeds import derive
from offbeat.types import UNKNOWN


class ObjectiveTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL comes without types
    """`GRPOTrainer` with the loss of a preset; `offbeat objectives` lists them."""

    def __init__(self, *args: Any, preset: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objective = ObjectiveConfig(preset=preset, kl_coefficient=self.beta).resolve()

    def _calculate_rewards(self, *args: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args)  # of all processes; TRL passes only advantages on
        return torch.as_tensor(self._rewards)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Add the objective's credit to TRL's batch; TRL shuffles and splits it together with its own rows."""
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        gather = self.accelerator.gather
        size = self.num_generations if self.model.training else self.num_generations_eval
        mask_NT = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        rewards_BG = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1).view(-1, size)
        scored_BG = ~self._rewards.isnan().all(1).view(-1, size)  # None from every reward function: unscored, not 0
        seeds = [derive(self.args.seed, "group", self.state.global_step, group) for group in range(len(rewards_BG))]
        lengths_BG = gather(mask_NT.sum(-1)).view(-1, size)
        credit = assign_credit(self.objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds)
        mine = slice(self.accelerator.process_index * len(mask_NT), (self.accelerator.process_index + 1) * len(mask_NT))
        trained_NT = mask_NT & credit.trained_BG.flatten()[mine, None]
        batch |= {"advantages": credit.advantages_BG.flatten()[mine], "weights": credit.weights_BG.flatten()[mine]}
        batch |= {"trained": trained_NT, "tokens": gather(trained_NT.sum()).sum()}
        return batch | {"sequences": gather(trained_NT.any(-1).sum()).sum()}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        completion = inputs["completion_ids"].size(1)
        policy_NT = self._get_per_token_logps_and_entropies(model, ids, attention, completion)[0]
        proximal_NT = inputs.get("old_per_token_logps", policy_NT.detach())  # TRL omits it if they are equal
        behavior_NT = inputs.get("sampling_per_token_logps", proximal_NT)  # vLLM's own, if vLLM generated
        streams = Streams(
            policy_NT=policy_NT,
            behavior_NT=torch.where(behavior_NT.isnan(), proximal_NT, behavior_NT),
            proximal_NT=proximal_NT,
            reference_NT=inputs.get("ref_per_token_logps", UNKNOWN),
            advantages_N=inputs["advantages"],
            weights_N=inputs["weights"],
            mask_NT=inputs["trained"],
        )
        total = Counts(int(inputs["tokens"]), int(inputs["sequences"]))
        loss = policy_loss(self.objective, streams, total, length_limit=self.max_completion_length)
        # The counts are of a whole generation batch: here is the share of one window of accumulation, and gradients
        # are averaged over processes afterwards.
        updates = self.args.steps_per_generation / self.current_gradient_accumulation_steps if model.training else 1
        return loss.total * (updates * int(self.accelerator.num_processes))


def sevens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of 7 among the tokens of each completion."""
    return [ids.count(7) / len(ids) for ids in completion_ids]


def tiny_llama() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a model with random weights and a tokenizer whose words are its token ids."""
    torch.manual_seed(0)
    words = {"<pad>": 0, "<end>": 1, **{str(number): number for number in range(2, 24)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<end>"
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape, **ends)), tokenizer


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and return the mean reward of every generated batch."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", default="rec-oneside-nois")
    options.add_argument("--steps", type=int, default=10)
    args = options.parse_args(arguments)
    model, tokenizer = tiny_llama()
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            num_iterations=2,  # every batch is used twice, so TRL keeps the behavior log-probs
            num_generations=8,
            max_completion_length=8,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        prompts = Dataset.from_dict({"prompt": [str(number) for number in range(2, 24)]})
        trainer = ObjectiveTrainer(
            model, sevens, config, train_dataset=prompts, processing_class=tokenizer, preset=args.preset
        )
        trainer.train()
    rewards = [float(line["reward"]) for line in trainer.state.log_history if "reward" in line]
    first, last = rewards[0], rewards[-1]
    print(f"{args.preset}: {args.steps} steps, mean reward {first:.2f} in the first batch, {last:.2f} in the last")
    return rewards


if __name__ == "__main__":
    main()
