"""Check the TRL example: does it learn, and does it compute TRL's own gradient if the objective is TRL's?

    python -m lab.parity.trl_example           10 steps with each of two presets, five batches of gradients; minutes;
                                               writes rows user-path.6.*
    python -m lab.parity.trl_example --short   one seed of gradients, nothing recorded

The batches for the gradients are those of `trl_parity.py`: TRL pads and scores them, and log-probs are moved so that
ratios spread. There, we combine offbeat's loss by hand. Here, `ObjectiveTrainer` does, on the batch of its parent.
"""

import ast
import sys
import tempfile
from typing import Any

import torch
import trl
from trl.trainer.utils import split_tensor_dict

from lab.figures import ROOT, Figure, command_parser, report
from lab.parity.trl_parity import SEEDS, SPREAD, draw, take_gradient, tiny_model, trl_trainer

sys.path.insert(0, str(ROOT))
from examples.trl_objective import ObjectiveTrainer  # found thanks to the line above
from examples.trl_objective import main as train

PRESETS = ("rec-oneside-nois", "red-weight")
GOAL = 1e-5
LINES = 60


def lines_of_the_trainer() -> int:
    """Return the number of lines of the class that a user copies."""
    tree = ast.parse((ROOT / "examples" / "trl_objective.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert found.end_lineno is not None
    return found.end_lineno - found.lineno + 1


def difference(seed: int) -> float:
    """Return ‖g_trl - g_ours‖ / ‖g_trl‖ with preset grpo."""
    model = tiny_model(seed)
    prompts, completions, rewards_BG = draw(seed, no_contrast=2, unscored=0)
    scripted = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
    inputs = [{"prompt": "w2", "grade": float(reward)} for reward in rewards_BG.flatten()]
    with tempfile.TemporaryDirectory() as directory:
        theirs = trl_trainer("grpo", model, scripted, directory)
        ours = ObjectiveTrainer(
            model,
            theirs.reward_funcs,
            theirs.args,
            train_dataset=theirs.train_dataset,
            processing_class=theirs.processing_class,
            rollout_func=theirs.rollout_func,
            preset="grpo",
        )
    model.train()
    their_gradient, whole, halves = (
        _gradient(trainer, inputs, seed, parts) for trainer, parts in ((theirs, 1), (ours, 1), (ours, 2))
    )
    return max(float((their_gradient - g).norm() / their_gradient.norm()) for g in (whole, halves))


def _gradient(trainer: trl.GRPOTrainer, inputs: list[dict[str, Any]], seed: int, parts: int) -> torch.Tensor:
    """Return the gradient of a batch in `parts` parts, accumulated as in the training loop, which does not run here."""
    batch = trainer._generate_and_score_completions(inputs)
    rng = torch.Generator().manual_seed(seed)
    batch["old_per_token_logps"] += SPREAD * (2 * torch.rand(batch["completion_ids"].shape, generator=rng) - 1)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = parts
    for part in split_tensor_dict(batch, parts):
        trainer.compute_loss(trainer.model, part).backward()
    return take_gradient(trainer.model)


def main() -> bool:
    short = command_parser(__doc__, short="one seed of gradients; record nothing").parse_args().short
    torch.set_num_threads(1)
    lines = lines_of_the_trainer()
    found = []
    for preset in PRESETS:
        rewards = train(["--preset", preset, "--steps", "10"])
        found.append(
            Figure(
                f"user-path.6.{preset}",
                f"the TRL example, 10 steps on the tiny model with {preset}: mean reward of the last batch",
                "above the first batch's",
                round(rewards[-1], 3),
                "reward",
                rewards[-1] > rewards[0],
                10,
                f"{rewards[0]:.3f} in the first batch; TRL {trl.__version__}, each batch used twice",
            )
        )
    seeds = list(SEEDS)[:1] if short else list(SEEDS)
    worst = max(difference(seed) for seed in seeds)
    found.append(
        Figure(
            "user-path.6.grpo",
            f"gradient of the TRL example's trainer with preset grpo against TRL {trl.__version__}'s",
            "<= 1e-5",
            float(f"{worst:.1e}"),
            "relative difference",
            worst <= GOAL,
            len(seeds),
            "worst seed, whole or accumulated over two parts; batches of lab/parity/trl_parity.py, float32",
        )
    )
    found.append(
        Figure(
            "user-path.6.lines",
            "lines of the GRPOTrainer subclass that takes any preset",
            f"<= {LINES}",
            lines,
            "lines",
            lines <= LINES,
            1,
        )
    )
    return report(short, *found)


if __name__ == "__main__":
    sys.exit(not main())
