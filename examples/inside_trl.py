"""Train off-policy inside TRL: TRL generates, scores and steps; offbeat has the objective, the sync period and the log.

    python examples/inside_trl.py                                   weights for generation are loaded every 4 steps
    python examples/inside_trl.py --sync-every 1 --preset red-weight
    python examples/inside_trl.py --replay 0.5 --keep runs/trl      half of each batch is drawn from the log

A tiny Llama with random weights gets a reward for every 7 that it generates; a minute on CPU. For your own model change
`GRPOTrainer(...)` to `OffPolicyGRPOTrainer(..., sync_every=4)`. Needs `pip install trl==1.16.0`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig

from offbeat.inside.trl import OffPolicyGRPOTrainer


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


def train(
    directory: Path,
    *,
    preset: str,
    sync_every: int,
    replay: float = 0.0,
    steps: int = 12,
    experience: Path | None = None,
    resume_from_checkpoint: bool = False,
    **settings: Any,
) -> OffPolicyGRPOTrainer:
    """Train in a directory and return the trainer; its run directory is `directory/run`."""
    model, tokenizer = tiny_llama()
    own = {name: settings.pop(name) for name in ("rollout_func", "reuse_budget", "max_replay_lag") if name in settings}
    config = GRPOConfig(
        output_dir=str(directory),
        max_steps=steps,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        **{"save_strategy": "no", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, **settings},
    )
    prompts = [str(number) for number in range(2, 24)]
    trainer = OffPolicyGRPOTrainer(
        model,
        sevens,
        config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        preset=preset,
        sync_every=sync_every,
        out=directory / "run",
        experience=experience,
        replay_share=replay,
        **own,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer


def main() -> None:
    """Train as the command says, and print what became of rewards, lag and log."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--preset", default="grpo-off-policy")
    options.add_argument("--sync-every", type=int, default=4)
    options.add_argument("--replay", type=float, default=0.0, help="share of each batch that is drawn from the log")
    options.add_argument("--keep", type=Path, help="a directory for the run; left out, nothing is kept")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        trainer = train(
            args.keep or Path(temporary), preset=args.preset, sync_every=args.sync_every, replay=args.replay
        )
        lines = [line for line in trainer.state.log_history if "reward" in line]
        print("step  reward  version   lag  drift   ess")
        for line in lines:
            shown = [line.get(f"offbeat/{name}", float("nan")) for name in ("lag", "drift_tv_token", "ess")]
            print(f"{line['step']:4}  {line['reward']:6.2f}  {line['offbeat/version']:7.0f}", end="")
            print(f"  {shown[0]:4.1f}  {shown[1]:.3f}  {shown[2]:.2f}")
        if args.keep is not None:
            print(f"offbeat report {args.keep}/run shows it as a page, offbeat view {args.keep}/run every answer")


if __name__ == "__main__":
    main()
