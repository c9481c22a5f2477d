"""Check `OffPolicyGRPOTrainer` inside the real TRL: gradients, versions, log-probs, kill and resume, weight transfers.

    python -m lab.parity.inside_trl           minutes; writes rows inside.2.*
    python -m lab.parity.inside_trl --short   one seed of gradients, nothing recorded

The batches for the gradients are those of `trl_parity.py`. Runs are those of `examples/inside_trl.py`, at v = 4. A
killed run is a process that gets SIGKILL in its seventh step and resumes from TRL's checkpoint of step 4.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import trl
from trl.trainer.utils import split_tensor_dict

from lab.figures import ROOT, Figure, command_parser, report
from lab.parity.trl_parity import SEEDS, SPREAD, draw, take_gradient, tiny_model, trl_trainer
from offbeat.experience.reader import LogReader
from offbeat.inside.trl import OffPolicyGRPOTrainer

sys.path.insert(0, str(ROOT))
from examples.inside_trl import tiny_llama, train  # found thanks to the line above

V, STEPS = 4, 12


def difference(seed: int, parts: int) -> float:
    """Return ‖g_trl - g_ours‖ / ‖g_trl‖ with preset grpo, ours accumulated over `parts` parts."""
    model = tiny_model(seed)
    prompts, completions, rewards_BG = draw(seed, no_contrast=2, unscored=0)
    scripted = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
    inputs = [{"prompt": "w2", "grade": float(reward)} for reward in rewards_BG.flatten()]
    with tempfile.TemporaryDirectory() as directory:
        theirs = trl_trainer("grpo", model, scripted, directory)
        theirs.args.loss_type = "dapo"  # TRL has read "grpo" from it; ours refuses a loss type that it would not use
        ours = OffPolicyGRPOTrainer(
            model,
            theirs.reward_funcs,
            theirs.args,
            train_dataset=theirs.train_dataset,
            processing_class=theirs.processing_class,
            rollout_func=theirs.rollout_func,
            preset="grpo",
        )
    model.train()
    theirs_gradient, gradient = (_gradient(one, inputs, seed, n) for one, n in ((theirs, 1), (ours, parts)))
    return float((theirs_gradient - gradient).norm() / theirs_gradient.norm())


def _gradient(trainer: trl.GRPOTrainer, inputs: list[dict[str, Any]], seed: int, parts: int) -> torch.Tensor:
    """Return the gradient of a batch in `parts` parts, accumulated as in the training loop, which does not run here."""
    batch = trainer._generate_and_score_completions(inputs)
    rng = torch.Generator().manual_seed(seed)
    batch["old_per_token_logps"] += SPREAD * (2 * torch.rand(batch["completion_ids"].shape, generator=rng) - 1)
    if "behavior" in batch:
        batch["behavior"] = batch["old_per_token_logps"]
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = parts
    for part in split_tensor_dict(batch, parts):
        trainer.compute_loss(trainer.model, part).backward()
    return take_gradient(trainer.model)


def versions_and_logprobs() -> tuple[list[int], float, int]:
    """Return the version of every step, and the worst log-prob against the weights of the version that wrote it."""
    policies: dict[int, dict[str, torch.Tensor]] = {}
    generate = OffPolicyGRPOTrainer._generate

    def remember(self: OffPolicyGRPOTrainer, prompts: list[Any]) -> Any:
        step = int(self.state.global_step)
        policies[step] = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        return generate(self, prompts)

    with tempfile.TemporaryDirectory() as directory, patch.object(OffPolicyGRPOTrainer, "_generate", remember):
        train(Path(directory), preset="grpo-off-policy", sync_every=V, steps=STEPS)
        groups = list(LogReader.open(Path(directory) / "run" / "experience").groups())
    by_step = {cast(Any, group.prompt.columns["host"])["step"]: group.oldest_version for group in groups}
    model, worst, tokens = tiny_llama()[0].eval(), 0.0, 0
    for group in groups:
        model.load_state_dict(policies[group.oldest_version or 0])
        for one in group.completions:
            ids = torch.tensor([*group.prompt.token_ids.tolist(), *one.token_ids.tolist()])[None]
            logits = model(ids).logits[0, -len(one.token_ids) - 1 : -1].float()
            ours = logits.log_softmax(-1).gather(-1, ids[0, -len(one.token_ids) :, None])[:, 0].detach().numpy()
            worst = max(worst, float(np.abs(ours - one.behavior_logprobs).max()))
            tokens += len(one.token_ids)
    return [by_step[step] or 0 for step in range(STEPS)], worst, tokens


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from examples import inside_trl
from offbeat.inside.trl import OffPolicyGRPOTrainer
log = OffPolicyGRPOTrainer._log_figures
def kill(self):
    log(self)
    if self.state.global_step == 6: os.kill(os.getpid(), signal.SIGKILL)
OffPolicyGRPOTrainer._log_figures = kill
inside_trl.train(Path({directory!r}), preset="grpo-off-policy", sync_every=4, save_strategy="steps", save_steps=4)
"""


def killed_and_resumed() -> tuple[bool, str]:
    """Kill a run in step 7, resume it from TRL's checkpoint of step 4, and compare its log with what it should hold."""
    with tempfile.TemporaryDirectory() as directory:
        code = KILLED.format(root=str(ROOT), directory=directory)
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
        before = LogReader.open(Path(directory) / "run" / "experience").size()
        resumed: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "resume_from_checkpoint": True}
        train(Path(directory), preset="grpo-off-policy", sync_every=V, steps=STEPS, **resumed)
        reader = LogReader.open(Path(directory) / "run" / "experience")
        versions, ledger = [group.oldest_version for group in reader.groups()], reader.ledger()
    # Steps 0 to 6 wrote 28 groups; the run went on at 4. Those of steps 4 to 6 are of version 4, which still exists.
    expected = [0] * 16 + [4] * 12 + [4] * 16 + [8] * 16
    held = before == 28 and versions == expected and str(ledger).startswith("60 generated = 48 trained + 12 waiting")
    return held, str(ledger)


RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from examples import inside_trl
def rollout(prompts, trainer):
    step = trainer.state.global_step
    first = trainer.accelerator.process_index * len(prompts)
    rows = range(first, first + len(prompts))
    answers = [[(7 * row + 3 * step + t * t) % 22 + 2 for t in range(4 + row % 5)] for row in rows]
    ids = [trainer.processing_class.encode(one) for one in prompts]
    return {{"prompt_ids": ids, "completion_ids": answers, "logprobs": [[-3.0] * len(one) for one in answers]}}
settings = {{"per_device_train_batch_size": {rows}, "gradient_accumulation_steps": 2, "rollout_func": rollout}}
trainer = inside_trl.train(
    Path({directory!r}), preset="red-weight-adaptive", sync_every=2, replay={replay}, steps=3, **settings
)
if trainer.accelerator.is_main_process:
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    Path({directory!r}, "norms.json").write_text(json.dumps(norms))
"""


def on_ranks(ranks: int, replay: float) -> tuple[list[float], str]:
    """Train three steps on scripted answers, on one process or two. Return the gradient norms and the ledger."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "train.py"
        filled = RANKS.format(root=str(ROOT), directory=directory, rows=16 // ranks, replay=replay)
        script.write_text(filled, encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, *launch, str(script)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        norms: list[float] = json.loads((Path(directory) / "norms.json").read_text(encoding="utf-8"))
        return norms, str(LogReader.open(Path(directory) / "run" / "experience").ledger())


def async_gradient(preset: str | None, seed: int) -> torch.Tensor:
    """Return ∂loss/∂log-probs of TRL's asynchronous trainer on a packed batch, its own loss or a preset's."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from offbeat.inside.trl_async import OffPolicyAsyncGRPOTrainer, one_stream

    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (6,), generator=rng)
    n = int(lengths.sum())
    policy = (-3 * torch.rand(n, generator=rng)).requires_grad_()
    segment = torch.repeat_interleave(torch.arange(6), lengths)[None]
    inputs = {
        "segment_id": segment,
        "token_index": torch.arange(n)[None],
        "old_log_probs": policy.detach()[None] + SPREAD * (2 * torch.rand(1, n, generator=rng) - 1),
        "advantages": torch.randn(6, generator=rng)[segment],
        "global_n_tokens": torch.tensor([float(2 * n)]),
        "global_n_forward_tokens": torch.tensor([float(2 * n)]),
        "mean_seq_len": torch.tensor([5.0]),
        "tree_max_seqlens": torch.tensor([[n, n]]),
    }
    inputs |= dict.fromkeys(("attention_mask", "input_ids", "position_ids", "shift_labels"), torch.ones(1, n).long())
    inputs |= dict.fromkeys(("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k"), torch.zeros(1, 2).long())
    trainer: Any = object.__new__(AsyncGRPOTrainer if preset is None else OffPolicyAsyncGRPOTrainer)
    alone = _Bag(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer.accelerator, trainer._metrics = alone, {"train": defaultdict(list)}
    trainer.epsilon_low = trainer.epsilon_high = 0.2
    trainer.aux_loss_enabled, trainer.current_gradient_accumulation_steps = False, 2
    for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{name}", 0.0)
    trainer.objective = None if preset is None else one_stream(preset)
    outputs = _Bag(log_probs=policy[None], entropy=torch.zeros(1, n))
    trainer.compute_loss(lambda **_: outputs, inputs).backward()
    assert policy.grad is not None and (preset is None or trainer._metrics["train"]["offbeat/drift_tv_token"])
    return policy.grad


class StubClient:
    """TRL's client of a vLLM server, without a server: random tokens, and a count of transfers by step."""

    def __init__(self, **_: Any) -> None:
        self.loads = 0

    def init_communicator(self, **_: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], params: Iterator[Any]) -> None:
        self.loads += 1
        assert len(list(params)) == len(metadata) > 0

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **_: Any) -> dict[str, Any]:
        answers = np.random.default_rng(self.loads).integers(2, 24, (len(prompts) * n, max_tokens)).tolist()
        logprobs = [[[-3.0] for _ in one] for one in answers]
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": logprobs}


class StubEngine:
    """vLLM inside the trainer's process, without vLLM: the same."""

    def __init__(self, **_: Any) -> None:
        self.loads, self.rng = 0, np.random.default_rng(0)
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += weights[0][0] == "lm_head.weight"

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, **_: Any) -> list[Any]:
        def output(prompt: dict[str, Any]) -> Any:
            tokens = self.rng.integers(2, 24, 8).tolist()
            logprobs = [{token: _Bag(logprob=-3.0, rank=1)} for token in tokens]
            return _Bag(
                prompt_token_ids=prompt["prompt_token_ids"], outputs=[_Bag(token_ids=tokens, logprobs=logprobs)]
            )

        return [output(prompt) for prompt in prompts]


class _Bag:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@contextmanager
def without_vllm() -> Iterator[None]:
    """Let TRL believe that vLLM is installed, and give it the stubs."""
    generation = "trl.generation.vllm_generation"
    with (
        patch.multiple(generation, VLLMClient=StubClient, is_vllm_available=lambda *_, **__: True),
        patch.multiple(generation, create=True, LLM=StubEngine, SamplingParams=_Bag),
    ):
        yield


def transfers(mode: str) -> tuple[int, list[int]]:
    """Return how often weights went to vLLM in a run of 12 steps at v = 4, and the version of each step."""
    settings: dict[str, Any] = {"use_vllm": True, "vllm_mode": mode}
    with without_vllm(), tempfile.TemporaryDirectory() as directory:
        trainer = train(Path(directory), preset="grpo-off-policy", sync_every=V, steps=STEPS, **settings)
        engine = trainer.vllm_generation
        found = engine.vllm_client.loads if mode == "server" else engine.llm.loads
        versions = [line["offbeat/version"] for line in trainer.state.log_history if "offbeat/version" in line]
    return found, [int(version) for version in versions]


def figures(short: bool) -> Iterator[Figure]:
    """Measure everything, and yield the rows."""
    release = f"TRL {trl.__version__}, float32, CPU"
    seeds = list(SEEDS)[:1] if short else list(SEEDS)
    for name, parts in (("gradient", 1), ("gradient-accumulated", 2)):
        worst = max(difference(seed, parts) for seed in seeds)
        what = f"gradient of OffPolicyGRPOTrainer with preset grpo against TRL's loss_type grpo, {parts} part(s)"
        note = f"worst seed; {release}; log-ratios within ± {SPREAD}"
        yield Figure(
            f"inside.2.{name}", what, "<= 1e-6", float(f"{worst:.1e}"), "relative", worst <= 1e-6, len(seeds), note
        )
    expected = [step // V * V for step in range(STEPS)]
    versions, worst, tokens = versions_and_logprobs()
    right = sum(found == wanted for found, wanted in zip(versions, expected, strict=True))
    what = f"steps of a real run at v = {V} whose groups in the log have the version 0, 0, 0, 0, 4, ..."
    yield Figure("inside.2.versions", what, f"{STEPS} of {STEPS}", right, "steps", right == STEPS, STEPS, release)
    what = "log-probs in the log against those of the weights of the version that wrote them, worst token"
    yield Figure("inside.2.logprobs", what, "<= 1e-5", float(f"{worst:.1e}"), "nats", worst <= 1e-5, tokens, release)
    held, ledger = killed_and_resumed()
    what = "a run killed with SIGKILL in step 7 and resumed from TRL's checkpoint: versions, ledger and groups as due"
    yield Figure("inside.2.resume", what, "1 of 1", int(held), "runs", held, 1, ledger)
    worst, ledgers = 0.0, []
    for replay in (0.0, 0.5):
        (alone, ledger), (together, other) = on_ranks(1, replay), on_ranks(2, replay)
        # With replay, each process draws its own share, so only the first step has the same groups.
        same = slice(None) if replay == 0 else slice(1)
        pairs = zip(alone[same], together[same], strict=True)
        worst = max([worst, *(abs(one - two) / one for one, two in pairs)])
        ledgers += [ledger, other]
    what = "gradient norms on two gloo processes against one, scripted answers, red-weight-adaptive"
    compared = "two whole groups a process and step; with replay only the first step, before anything is replayed"
    note = f"{compared}; ledgers {'; '.join(dict.fromkeys(ledgers))}; {release}"
    held = worst <= 1e-5 and all("+ 0 waiting" in one for one in ledgers)
    yield Figure("inside.2.ranks", what, "<= 1e-5", float(f"{worst:.1e}"), "relative", held, 4, note)
    both = [(async_gradient(None, seed), async_gradient("rec-oneside-is", seed)) for seed in seeds]
    worst = max(float((theirs - ours).norm() / theirs.norm()) for theirs, ours in both)
    what = "gradient of OffPolicyAsyncGRPOTrainer with rec-oneside-is against TRL's asynchronous loss, packed rows"
    note = f"compute_loss alone, with made-up log-probs: its attention needs a GPU; {release}"
    yield Figure("inside.2.async", what, "<= 1e-6", float(f"{worst:.1e}"), "relative", worst <= 1e-6, len(both), note)
    for mode in ("server", "colocate"):
        loads, versions = transfers(mode)
        what = f"loads of weights into vLLM, {mode} mode, in {STEPS} steps at v = {V}"
        note = f"TRL's code with a stub of its client or engine; versions {versions}; {release}"
        held = loads == STEPS // V and versions == expected
        yield Figure(f"inside.2.transfers-{mode}", what, f"{STEPS // V}", loads, "loads", held, STEPS, note)


def main() -> bool:
    short = command_parser(__doc__, short="one seed of gradients; record nothing").parse_args().short
    torch.set_num_threads(1)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return report(short, *figures(short))


if __name__ == "__main__":
    sys.exit(not main())
