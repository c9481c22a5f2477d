"""The peers of `python -m lab.bench.end_to_end`: GRPO of TRL and of TorchRL, which generate with transformers.

Both train all weights without a KL term, one update on each batch, and force lengths with `min_new_tokens`. They
compute in the same dtype as our arms. Except for TRL with its defaults, they get the fastest settings that we know of:
no gradient checkpoints, and micro-batches as large as ours.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lab.bench.end_to_end_arms import TOKENS_TOGETHER, Job
from lab.bench.training_arms import DTYPE, DTYPE_NAME
from lab.fixtures import smollm2
from lab.fixtures.forced_lengths import lottery
from lab.fixtures.gates import Turns

if TYPE_CHECKING:
    from tensordict import TensorDict

LOGITS_TOGETHER: Final = 8192
"""Tokens that TorchRL generates in one call. It keeps float32 logits of all of them, 200 kB each, three times."""


class PhaseTimer:
    """Seconds by phase since the start."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] += time.perf_counter() - began


def rows_together(job: Job, tokens: int) -> int:
    """Return how many completions with their prompts fit, as a divisor of the batch."""
    rows = job.groups * job.size
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n * (job.prompt + job.completion) <= tokens)


def trl(turns: Turns, job: Job, *, defaults: bool) -> None:
    """Train with `GRPOTrainer.train`, either with fast settings or with TRL's defaults for what the job leaves open.

    The dtype is never left open. TRL's default is autocast to bfloat16, so only on a processor that emulates bfloat16
    the arm with defaults turns that off, and loads the model in float32.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    timer, path, rows = PhaseTimer(), str(smollm2.directory()), job.groups * job.size

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            with timer.phase("generation"):
                found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            job.check({"prompt": [len(one) for one in prompt_ids], "completion": [len(one) for one in found[0]]})
            assert len(found[0]) == rows, f"a step on {len(found[0])} completions instead of {rows}"
            return found

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            before = timer.spent["generation"]
            began = time.perf_counter()
            found = super()._generate_and_score_completions(*args, **kwargs)
            # Rewards, padding and advantages belong neither to generation nor to training.
            timer.spent["scoring"] += time.perf_counter() - began - (timer.spent["generation"] - before)
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            spent = ("generation", "scoring")
            before, began = sum(timer.spent[name] for name in spent), time.perf_counter()
            found = super().training_step(*args, **kwargs)
            inside = sum(timer.spent[name] for name in spent) - before
            timer.spent["training"] += time.perf_counter() - began - inside
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
    together = min(8, rows) if defaults else rows_together(job, TOKENS_TOGETHER)
    with tempfile.TemporaryDirectory() as directory:
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
        )
        trainer.train()


def _of_full_length(found: "TensorDict", tokens: int) -> "TensorDict":
    """Return answers of so many tokens. Rarely one has a padding token, which TorchRL's wrapper cuts out."""
    full = [i for i, one in enumerate(found.unbind(0)) if len(one["tokens", "response"]) == tokens]
    return found if len(full) == len(found) else found[[i if i in full else full[0] for i in range(len(found))]]


def torchrl(turns: Turns, job: Job) -> None:
    """Train with the parts of TorchRL's recipe: a wrapper that generates, `MCAdvantage`, and `GRPOLoss`.

    The recipe's collector and environment need vLLM on a GPU and a chat data set, so this loop calls the wrapper
    itself. Generation and training share one model, and no weights are copied.
    """
    import torch
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage
    from transformers import AutoModelForCausalLM, AutoTokenizer

    set_list_to_stack(True).set()
    path, rows = str(smollm2.directory()), job.groups * job.size
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE).eval()
    model.generation_config.top_k = 0  # the wrapper refuses 0 as an argument, and 50 is the default of transformers
    wrapper = partial(TransformersWrapper, model, tokenizer=tokenizer, input_mode="tokens", return_log_probs=True)
    length = {"max_new_tokens": job.completion, "min_new_tokens": job.completion}
    generator = wrapper(generate=True, generate_kwargs={**length, "do_sample": True, "temperature": 1.0, "top_p": 1.0})
    loss = GRPOLoss(actor_network=wrapper(generate=False, pad_model_input=True), entropy_bonus=False)
    together = rows_together(job, TOKENS_TOGETHER)
    memory = ReplayBuffer(
        storage=LazyStackStorage(rows),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=job.size),
        batch_size=together,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    token_ids = torch.tensor([tokenizer.encode(text) for text in job.texts()])
    timer, step, more = PhaseTimer(), 0, True

    def generate(prompts: torch.Tensor) -> TensorDict:
        at_once = rows_together(job, LOGITS_TOGETHER * (job.prompt + job.completion) // job.completion)
        with torch.no_grad():
            parts = [
                generator(TensorDict({("tokens", "prompt"): part}, [len(part)])) for part in prompts.split(at_once)
            ]
        return _of_full_length(parts[0] if len(parts) == 1 else torch.cat(parts), job.completion)

    while more:
        chosen = (torch.arange(job.groups) + step * job.groups) % len(token_ids)
        with timer.phase("generation"):
            found = generate(token_ids[chosen.repeat_interleave(job.size)])
        answers = found["tokens", "response"]
        job.check({"prompt": [found["tokens", "prompt"].shape[1]], "completion": [answers.shape[1]]})
        assert len(found) == rows and not (answers == tokenizer.eos_token_id).any()
        with timer.phase("scoring"):
            rewards = torch.tensor(lottery(tokenizer.batch_decode(answers))).view(rows, 1, 1)
            found["query"] = [f"{step}-{one}" for one in chosen.repeat_interleave(job.size).tolist()]
            found["next"] = TensorDict({"reward": rewards, "done": torch.ones(rows, 1, dtype=torch.bool)}, [rows])
            found["log_probs", "full"] = torch.nn.functional.pad(found["log_probs", "response"], (job.prompt, 0))
            memory.extend(found)
        with timer.phase("training"):
            parts = 0
            for batch in memory:
                (loss(batch).mean(reduce=True) * together / rows).backward()
                parts += len(batch)
            assert parts == rows, f"a step trained {parts} completions instead of {rows}"
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        memory.empty()
        step += 1
        more = turns.step_done(timer.spent)


PEERS: Final[dict[str, Callable[[Turns, Job], None]]] = {
    "trl": partial(trl, defaults=False),
    "trl-default": partial(trl, defaults=True),
    "torchrl": torchrl,
}
