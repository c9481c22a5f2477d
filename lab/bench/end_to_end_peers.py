"""The peers of `python -m lab.bench.end_to_end`: TorchRL, here, and the arms of TRL, in `end_to_end_trl.py`.

All train all weights without a KL term, one update on each batch, with completions of forced lengths. They compute in
the same dtype as our arms. Except for TRL with its defaults, they get the fastest settings that we know of: no gradient
checkpoints, and micro-batches as large as ours.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from lab.bench.end_to_end_arms import TOKENS_TOGETHER, Job
from lab.bench.end_to_end_trl import our_engine, random_completions, trl
from lab.bench.training_arms import DTYPE
from lab.fixtures import smollm2
from tests.fixtures.forced_lengths import lottery
from tests.fixtures.gates import PhaseTimer, Turns

if TYPE_CHECKING:
    from tensordict import TensorDict

LOGITS_TOGETHER: Final = 8192
"""Tokens that TorchRL generates in one call. It keeps float32 logits of all of them, 200 kB each, three times."""


def _of_full_length(found: "TensorDict", tokens: int) -> "TensorDict":
    """Return answers of full length. Rarely one has a padding token, which TorchRL's wrapper cuts out."""
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
    together = job.rows_together(TOKENS_TOGETHER)
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
        at_once = job.rows_together(LOGITS_TOGETHER * (job.prompt + job.completion) // job.completion)
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
    "trl-vllm": partial(trl, rollouts=our_engine),
    "trl-half": partial(trl, rollouts=random_completions),
    "torchrl": torchrl,
}
ENGINES: Final = {
    "trl": "TRL, generating with transformers",
    "trl-default": "TRL with its defaults, generating with transformers",
    "trl-vllm": "TRL, generating with our vLLM engine through rollout_func",
    "torchrl": "TorchRL, generating with transformers",
}
"""What generates in each arm of a peer, for the text of a row."""
