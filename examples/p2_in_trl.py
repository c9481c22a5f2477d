"""P2's rows inside TRL: fresh data, a lag of ten steps, ten updates a batch; with the zero-variance mask and without.

    python examples/p2_in_trl.py --out runs/p2             one GPU with 24 GB: Qwen2.5-0.5B-Instruct on GSM8K with vLLM
    python examples/p2_in_trl.py --out runs/p2 --rows v10,v10-mask --seeds 1,2,3
    python examples/p2_in_trl.py --out runs/p2 --smoke --model DIR --data DIR      two steps of each row on a CPU

Mroueh et al. 2025 (arXiv 2505.22257) changed TRL's GRPO trainer so that vLLM's weights stand still for v steps; here
that is `sync_every=v`. A row is trained, evaluated on all 1,319 test prompts with greedy answers, and kept in
`OUT/p2.jsonl` when it ends, so the command continues where it stopped. The table shows it beside the published figure
and with its interval over prompts. Published figures are of one seed each.

`--data` is a directory with GSM8K's train.jsonl and test.jsonl; left out, the hub has them. Needs
`pip install 'trl[vllm]==1.16.0'`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, load_dataset
from trl import GRPOConfig

from offbeat.inside.trl import OffPolicyGRPOTrainer
from offbeat.objective.presets import PRESETS
from offbeat.tasks.gsm8k import correct, examples

MASKED = PRESETS["grpo-off-policy"].objective


class Row(NamedTuple):
    """One way to train; the figure is P2's, of one seed."""

    sync_every: int
    updates: int
    mask: bool
    published: str


ROWS = {
    "v1": Row(1, 1, False, "45 %, unstable"),
    "v1-mask": Row(1, 1, True, "50 %"),
    "v10": Row(10, 1, False, "50 %, stable"),
    "v10-mask": Row(10, 1, True, "-"),
    "i10": Row(1, 10, False, "poorer, and ten times slower"),
    "i10-mask": Row(1, 10, True, "-"),
}
SETTINGS = {
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 16,  # 256 completions a step: 32 prompts
    "max_completion_length": 512,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "bf16": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.4,
}
SMOKE = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 16,
    "use_cpu": True,
    "bf16": False,
    "use_vllm": False,
}


def questions(split: str, directory: Path | None, count: int | None) -> Dataset:
    """Return prompts as chats, with the reference answer as a column."""
    if directory is None:
        found = load_dataset("openai/gsm8k", "main", split=split)
    else:
        found = load_dataset("json", data_files=str(directory / f"{split}.jsonl"), split="train")
    rows = [{"prompt": one.prompt, "answer": one.columns["answer"]} for one in examples(found)]
    return Dataset.from_list(rows[:count])


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for the reference number, in any spelling, otherwise 0."""
    return [correct(one[-1]["content"], {"answer": it}) for one, it in zip(completions, answer, strict=True)]


def accuracy(trainer: OffPolicyGRPOTrainer, test: Dataset) -> tuple[float, float, int]:
    """Return pass@1 of greedy answers to the test prompts, the half width of its interval, and their number."""
    trainer.temperature, trainer.num_generations_eval = 0.0, 1
    if trainer.use_vllm:
        trainer.vllm_generation.temperature = 0.0
    else:
        trainer.generation_config.do_sample, trainer.generation_config.temperature = False, None
    trainer.model.eval()
    scores: list[float] = []
    for start in range(0, len(test), 256):
        part = test.select(range(start, min(start + 256, len(test)))).to_list()
        answers = trainer._generate([one["prompt"] for one in part])[3]
        scores += right(answers, [one["answer"] for one in part])
    mean = sum(scores) / len(scores)
    return mean, 1.96 * (mean * (1 - mean) / len(scores)) ** 0.5, len(scores)


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one row and return what it reached."""
    row, out = ROWS[name], args.out / f"{name}-{seed}"
    config = GRPOConfig(
        output_dir=str(out / "trl"),
        max_steps=args.steps * row.updates,
        num_iterations=row.updates,
        seed=seed,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **(SETTINGS | (SMOKE if args.smoke else {})),
    )
    trainer = OffPolicyGRPOTrainer(
        args.model,
        right,
        config,
        train_dataset=questions("train", args.data, 8 if args.smoke else None),
        preset=replace(MASKED, zero_variance_mask=row.mask),
        sync_every=row.sync_every,
        out=out / "run",
    )
    trainer.train()
    pass_rate, half, prompts = accuracy(trainer, questions("test", args.data, 8 if args.smoke else None))
    versions = [line["offbeat/version"] for line in trainer.state.log_history if "offbeat/version" in line]
    kept = {"row": name, "seed": seed, "pass@1": round(pass_rate, 4), "half": round(half, 4), "prompts": prompts}
    return kept | {"steps": args.steps, "loads": len(set(versions)), "model": args.model}


def main() -> None:
    """Train what is missing and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    options.add_argument("--data", type=Path)
    options.add_argument("--rows", default=",".join(ROWS))
    options.add_argument("--seeds", default="1")
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--smoke", action="store_true", help="two steps, eight prompts, no vLLM, on a CPU")
    args = options.parse_args()
    args.steps = 2 if args.smoke else args.steps
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "p2.jsonl"
    done = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    for seed in [int(seed) for seed in args.seeds.split(",")]:
        for name in args.rows.split(","):
            if not any((one["row"], one["seed"]) == (name, seed) for one in done):
                done.append(run(name, seed, args))
                with file.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(done[-1]) + "\n")
    print(f"{'row':<10}{'seed':>5}{'pass@1':>9}{'±':>8}{'prompts':>9}{'loads':>7}   published (one seed)")
    for one in done:
        print(f"{one['row']:<10}{one['seed']:>5}{one['pass@1']:>9.4f}{one['half']:>8.4f}{one['prompts']:>9}", end="")
        print(f"{one['loads']:>7}   {ROWS[one['row']].published}")


if __name__ == "__main__":
    main()
