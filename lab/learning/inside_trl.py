"""Learning curves inside TRL on the sums: fresh data, lag of five steps and replay, against our own loop's arms.

    python -m lab.learning.inside_trl --minutes 60    train missing runs at one thread, minutes each, then write rows
    python -m lab.learning.inside_trl --minutes 0     compute rows inside.3.* from the runs that are there

An arm inside TRL has the settings of the arm of our loop that it is compared with: the model and the sums of block
`a-sums` and `d-sums` (`evidence/blocks.py`), rec-oneside-nois, 16 groups of 8, 100 steps, AdamW at 5e-4 after 5 steps
of warm-up, float32. TRL orders prompts and draws samples in its own way, so runs are compared as means over seeds. Each
run is kept in `inside_trl.jsonl` when it ends.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch

from lab.figures import ROOT, Figure, command_parser, commit, record
from lab.learning import model
from lab.learning.cells import EVERY, LAST, STEPS
from lab.learning.statistics import Interval, student_limit
from lab.learning.task import SUMS
from lab.learning.watched_learner import ExactPassRate

FILE: Final = ROOT / "lab" / "learning" / "inside_trl.jsonl"
SEEDS: Final = range(1, 6)
RATE: Final = 5e-4
PRESET: Final = "rec-oneside-nois"
ARMS: Final[dict[str, dict[str, Any]]] = {
    "v1": {"sync_every": 1},
    "v5": {"sync_every": 5},
    "replay": {"sync_every": 1, "replay_share": 0.5, "reuse_budget": 4},
}
OURS: Final = {"v1": ("a-sums", f"{PRESET} v1"), "v5": ("a-sums", f"{PRESET} v5"), "replay": ("d-sums", "replay")}
"""The block and the arm of our loop with the same settings."""


def exact(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for exactly the answer, otherwise 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def train(arm: str, seed: int) -> dict[str, Any]:
    """Train one run inside TRL and return its row."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig

    from offbeat.inside.trl import OffPolicyGRPOTrainer

    directory = str(model.directory())
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rates, curve = ExactPassRate.of(tokenizer), {}

    class Curve(TrainerCallback):  # type: ignore[misc]  # transformers comes without types
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % EVERY == 0:
                curve[state.global_step] = float(rates.pass_rates(policy).mean())

    with tempfile.TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place,
            max_steps=STEPS,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=4,
            learning_rate=RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            seed=seed,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = OffPolicyGRPOTrainer(
            policy,
            exact,
            config,
            train_dataset=Dataset.from_list([{"prompt": one.prompt, **one.columns} for one in SUMS]),
            processing_class=tokenizer,
            preset=PRESET,
            out=Path(place) / "run",
            callbacks=[Curve()],
            **ARMS[arm],
        )
        began = time.monotonic()
        trainer.train()
    curve[STEPS] = float(rates.pass_rates(policy).mean())
    seconds = round(time.monotonic() - began)
    rounded = {str(step): round(rate, 5) for step, rate in curve.items()}
    return {"arm": arm, "seed": seed, "curve": rounded, "seconds": seconds, "commit": commit()}


def final(curve: dict[str, float] | list[float]) -> float:
    """Return the mean of the last points of a curve."""
    return fmean(list(curve.values() if isinstance(curve, dict) else curve)[-LAST:])


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()] if FILE.exists() else []


def ours(arm: str) -> list[float]:
    """Return the final pass rates of our loop's arm, the same seeds."""
    block, name = OURS[arm]
    lines = (ROOT / "lab" / "learning" / "evidence" / f"{block}.jsonl").read_text(encoding="utf-8").splitlines()
    found = {
        one["seed"]: final(one["curve"])
        for one in map(json.loads, lines)
        if one["arm"] == name and one["rate"] == RATE and one["seed"] in SEEDS
    }
    return [found[seed] for seed in SEEDS]


def figures() -> list[Figure]:
    """Return a row for each arm that has all seeds."""
    made = []
    for arm in ARMS:
        theirs = [final(one["curve"]) for one in sorted(rows(), key=lambda one: one["seed"]) if one["arm"] == arm]
        if len(theirs) < len(SEEDS):
            continue
        own = ours(arm)
        inside, outside = Interval.of(theirs), Interval.of(own)
        # Two independent means: the half width of their difference, with the freedom of both samples.
        spread = ((inside.half / student_limit(4)) ** 2 + (outside.half / student_limit(4)) ** 2) ** 0.5
        half = student_limit(8) * spread
        apart = inside.mean - outside.mean
        note = f"inside TRL {inside}, our loop's arm {OURS[arm][1]!r} of {OURS[arm][0]} {outside}; seeds 1 to 5 of each"
        made.append(
            Figure(
                f"inside.3.{arm}",
                f"final pass rate on the sums inside TRL minus that of our own loop, {arm}",
                "interval holds 0",
                f"{apart:+.3f} [{apart - half:+.3f}, {apart + half:+.3f}]",
                "pass@1",
                abs(apart) <= half,
                len(SEEDS),
                note,
            )
        )
    return made


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="do not begin another run after so many minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, done = time.monotonic(), {(one["arm"], one["seed"]) for one in rows()}
    for seed in SEEDS:
        for arm in ARMS:
            if (arm, seed) not in done and time.monotonic() - began < 60 * options.minutes:
                row = train(arm, seed)
                with FILE.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{arm}, seed {seed}: {final(row['curve']):.3f} after {row['seconds']} s", flush=True)
    record(*figures())


if __name__ == "__main__":
    main()
