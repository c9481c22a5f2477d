"""The arms of `python -m lab.bench.end_to_end` that are TRL's `GRPOTrainer`, by what generates their completions.

    trl, trl-default    transformers, inside the trainer
    trl-vllm            our vLLM engine, started as a run of ours starts it, through TRL's `rollout_func`
    trl-half            nothing: `rollout_func` returns random tokens, so that a step is the training half alone

With `trl-vllm` only the trainers differ from a run of ours. Before a step that follows an update it loads the trainer's
weights straight into the engine; a run of ours also publishes them to disk and probes the engine.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, cast

import numpy as np
import torch

from lab.bench.end_to_end_arms import TOKENS_TOGETHER, Job, offbeat_settings
from lab.bench.training_arms import DTYPE, DTYPE_NAME, VOCABULARY
from lab.fixtures import smollm2
from tests.fixtures.forced_lengths import lottery
from tests.fixtures.gates import PhaseTimer, Turns

Rollout = Callable[[list[str], Any], dict[str, Any]]
"""TRL's `rollout_func`: the prompts of a step, each repeated for its group, and the trainer."""
Rollouts = Callable[[Job, PhaseTimer], AbstractContextManager[Rollout | None]]
OUTSIDE_TRAINING: Final = ("generation", "sync", "scoring")


def inside_trl(job: Job, timer: PhaseTimer) -> AbstractContextManager[None]:
    """Let the trainer generate by itself, with transformers."""
    return nullcontext()


@contextmanager
def our_engine(job: Job, timer: PhaseTimer) -> Iterator[Rollout]:
    """Generate with the vLLM engine of a run of ours with the same job, and load every new version into it."""
    from transformers import AutoTokenizer

    from offbeat.config import parse
    from offbeat.rollout.engine import Request, Sampling
    from offbeat.run.engines import start_engine

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.directory()))
    settings = offbeat_settings(job, every=1, concurrent=False)
    config = parse(settings | {"model": settings["model"] | {"path": str(smollm2.directory())}})
    served, sampling = getattr(torch, config.model.serve), Sampling(job.completion, ())
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(config))

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            step = cast(int, trainer.state.global_step)
            if step != engine.version:
                with timer.phase("sync"):
                    weights = trainer.model.state_dict().items()
                    runner.run(engine.load(step, ((name, one.to(served)) for name, one in weights)))
            texts = [next(same) for _, same in itertools.groupby(prompts)]
            assert prompts == [text for text in texts for _ in range(job.size)], "prompts are not repeated in groups"
            with timer.phase("generation"):
                asked = [
                    Request(f"{step}-{i}", tokenizer.encode(text), job.size, sampling, seed=step * job.groups + i)
                    for i, text in enumerate(texts)
                ]
                groups = runner.run(engine.generate(asked))
            return {
                "prompt_ids": [one.prompt_ids.tolist() for one in asked for _ in range(job.size)],
                "completion_ids": [one.token_ids.tolist() for group in groups for one in group],
                "logprobs": [np.asarray(one.behavior_logprobs).tolist() for group in groups for one in group],
            }

        try:
            yield rollout
        finally:
            runner.run(engine.close())


@contextmanager
def random_completions(job: Job, timer: PhaseTimer) -> Iterator[Rollout]:
    """Return random tokens, which cost no time."""
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(str(smollm2.directory())), np.random.default_rng(0)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokens = rng.integers(0, VOCABULARY, (len(prompts), job.completion))
        return {
            "prompt_ids": [tokenizer.encode(text) for text in prompts],
            "completion_ids": tokens.tolist(),
            "logprobs": np.full(tokens.shape, -12.0).tolist(),
        }

    yield rollout


def trl(turns: Turns, job: Job, *, defaults: bool = False, rollouts: Rollouts = inside_trl) -> None:
    """Train with `GRPOTrainer.train`, either with fast settings or with TRL's defaults for what the job leaves open.

    The dtype is never left open. TRL's default is autocast to bfloat16, so only on a processor that emulates bfloat16
    the arm with defaults turns that off, and loads the model in float32.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    timer, path, rows = PhaseTimer(), str(smollm2.directory()), job.groups * job.size

    def outside() -> float:
        return sum(timer.spent[name] for name in OUTSIDE_TRAINING)

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            with timer.phase("generation"):
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._generate(*args, **kwargs)
            job.check({"prompt": [len(one) for one in found[0]], "completion": [len(one) for one in found[1]]})
            assert len(found[1]) == rows, f"a step on {len(found[1])} completions instead of {rows}"
            return found

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            before, began = outside(), time.perf_counter()
            found = super()._generate_and_score_completions(*args, **kwargs)
            # Rewards, padding and advantages belong neither to generation nor to training.
            timer.spent["scoring"] += time.perf_counter() - began - (outside() - before)
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            before, began = outside(), time.perf_counter()
            found = super().training_step(*args, **kwargs)
            timer.spent["training"] += time.perf_counter() - began - (outside() - before)
            return found

    class Gate(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            timer.spent["training"] += time.perf_counter() - self.began

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not turns.step_done(timer.spent)

    emulated = DTYPE is torch.float32
    fast: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
    slow: dict[str, Any] = {"bf16": False, "model_init_kwargs": {"dtype": DTYPE_NAME}} if emulated else {}
    together = min(8, rows) if defaults else job.rows_together(TOKENS_TOGETHER)
    with tempfile.TemporaryDirectory() as directory, rollouts(job, timer) as rollout:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=1_000_000,
            per_device_train_batch_size=together,
            gradient_accumulation_steps=rows // together,
            num_generations=job.size,
            max_completion_length=job.completion,
            generation_kwargs={"min_new_tokens": job.completion},
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **(slow if defaults else fast),
        )
        model = path if defaults else AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE)
        trainer = TimedTrainer(
            model=model,
            reward_funcs=lottery,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": job.texts()}),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            callbacks=[Gate()],
            rollout_func=rollout,
        )
        trainer.train()
