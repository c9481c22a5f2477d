"""TRL's reward functions give the numbers that TRL itself computes with them.

    python -m lab.parity.trl_calls            row door.6.trl; a minute

`GRPOTrainer._calculate_rewards` of the installed TRL calls each function with a whole batch: two prompts with four
completions each. Here they go through the scoring pool, prompt by prompt. The functions compare completions, wait,
have settings or a state, know the step, or are a reward model. They are as in TRL's documentation, and none is changed.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.figures import Figure, command_parser, record
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.reward_model import reward_model
from offbeat.tasks.rewards import Answers, Reward, from_trl
from offbeat.types import Json, Score
from tests.fixtures.judge import save_judge
from tests.fixtures.tiny_model import load_tokenizer, save_model

STEP, STEPS = 30, 40
TOLERANCE = 1e-5
"""For the reward model, whose batches differ; float32 of everything else is equal bit by bit."""


def shortest_of_its_prompt(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Compare the completions of a prompt: the shortest gets 1, the longest 0, and the others lie between."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        group = [len(other) for one, other in zip(prompts, completions, strict=True) if one == prompt]
        rewards.append(sum(length > len(completion) for length in group) / len(group))
    return rewards


async def judged(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    """Wait, as for a judge on the network; None if it has no opinion."""
    import asyncio

    async def ask(completion: str, right: str) -> float | None:
        await asyncio.sleep(0.01)
        return None if not completion else float(completion.strip() == right)

    return list(await asyncio.gather(*(ask(one, right) for one, right in zip(completions, answer, strict=True))))


def near_length(completion_ids: list[list[int]], *, target: int, scale: float = 3.0, **kwargs: Any) -> list[float]:
    """Score the number of tokens; `target` is bound by a partial."""
    return [float(np.exp(-abs(len(ids) - target) / scale)) for ids in completion_ids]


class Repetition:
    """Penalize repeated pairs of characters, as TRL's own class rewards are written."""

    def __init__(self, size: int, penalty: float) -> None:
        self.size, self.penalty = size, penalty

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        found = [[text[i : i + self.size] for i in range(len(text) - self.size + 1)] for text in completions]
        return [self.penalty * (1 - len(set(parts)) / len(parts)) if parts else 0.0 for parts in found]


repetition = Repetition(2, -0.7)
near_four = partial(near_length, target=4)


def curriculum(
    completions: list[str], answer: list[str], trainer_state: Any, log_metric: Any, log_extra: Any, **kwargs: Any
) -> list[float]:
    """Move from form to correctness with the step, and log both."""
    late = trainer_state.global_step / trainer_state.max_steps
    form = [float(text.isdigit()) for text in completions]
    right = [float(text == one) for text, one in zip(completions, answer, strict=True)]
    log_metric("form", sum(form))
    log_extra("right", right)
    return [(1 - late) * a + late * b for a, b in zip(form, right, strict=True)]


PROMPTS = [{"prompt": "17+25=", "answer": "42"}, {"prompt": "2*3=", "answer": "6"}]
COMPLETIONS = [["42", "4242", "it is 42", ""], ["6", "six", "66666", "6."]]


def of_trl(functions: list[Any], place: Path) -> list[list[float]]:
    """Return the rewards of each function for all completions, as TRL computes them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    save_model(place / "policy")
    tokenizer = load_tokenizer(place / "policy")
    args = GRPOConfig(
        output_dir=str(place / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=STEPS,
        use_cpu=True,
        bf16=False,  # TRL computes a reward model under autocast otherwise; ours is in float32
        report_to="none",
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(str(place / "policy")),
        reward_funcs=functions,
        args=args,
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=tokenizer,
    )
    trainer.state.global_step, trainer.state.max_steps = STEP, STEPS
    rows = [row for row, texts in zip(PROMPTS, COMPLETIONS, strict=True) for _ in texts]
    texts = [text for group in COMPLETIONS for text in group]
    ids = [tokenizer.encode(text) for text in texts]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], texts, ids)
    return [column.tolist() for column in found.T]


def of_pool(reward: Reward, place: Path) -> list[float]:
    """Return the rewards from the scoring pool, prompt by prompt; NaN for none, as in TRL."""
    tokenizer, found = load_tokenizer(place / "policy"), list[float]()
    with ScoringPool(
        [reward], (-1e9, 1e9), workers=1, memory_mib=6144, deadline=20.0, start_seconds=300.0, steps=STEPS
    ) as pool:
        for row, texts in zip(PROMPTS, COMPLETIONS, strict=True):
            columns: dict[str, Json] = {**row}
            answers = Answers(texts, columns, [tokenizer.encode(text) for text in texts], STEP)
            for outcome in pool.score_group(answers).result(timeout=600):
                found.append(outcome.reward if isinstance(outcome, Score) else float("nan"))
    return found


def compare(place: Path) -> dict[str, float]:
    """Return the largest difference between the two, by function; infinity if they differ in kind."""
    judge = save_judge(place / "judge")
    functions: dict[str, Callable[..., Any] | str] = {
        "compares a prompt's completions": shortest_of_its_prompt,
        "async, None": judged,
        "partial, token ids": near_four,
        "object of a class": repetition,
        "trainer_state, log_metric, log_extra": curriculum,
        "reward model": str(judge),
    }
    theirs = of_trl(list(functions.values()), place)
    differences = {}
    for (name, function), expected in zip(functions.items(), theirs, strict=True):
        reward = reward_model(function) if isinstance(function, str) else from_trl(function)
        found = np.array(of_pool(reward, place), np.float32)
        print(f"{name}\n  TRL     {expected}\n  offbeat {found.tolist()}", flush=True)
        same_kind = np.array_equal(np.isnan(found), np.isnan(expected)) and len(set(expected)) > 1
        differences[name] = float(np.nanmax(np.abs(found - np.array(expected, np.float32)))) if same_kind else np.inf
    return differences


def main() -> bool:
    command_parser(__doc__).parse_args()
    import trl

    with tempfile.TemporaryDirectory() as place:
        found = compare(Path(place))
    equal = [name for name, one in found.items() if one <= (TOLERANCE if name == "reward model" else 0.0)]
    return record(
        Figure(
            "door.6.trl",
            f"reward functions that give the numbers of TRL {trl.__version__}, called by its trainer",
            "6 of 6",
            f"{len(equal)} of {len(found)}",
            "functions",
            len(equal) == len(found) == 6,
            sum(map(len, COMPLETIONS)),
            "two prompts × four completions; largest difference in float32: "
            + ", ".join(f"{name} {one:.2g}" for name, one in found.items()),
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
