"""Make runs diverge in as many ways as we know: each must end with a sentence and continue by the command in it.

    python -m lab.torture.divergence           every way, and the cost of the check: rows trust.7, trust.7.cost; 6 min
    python -m lab.torture.divergence --short   four ways and fewer repetitions, nothing recorded
    python -m lab.torture.divergence --only NaN   the ways whose name contains this text, nothing recorded

A way is a real run of a tiny model with settings that break it, or with a value that is written into the trainer's
memory between two steps. It is contained if

1. the run ends with an `OffbeatError` that names a command, and with an `alarm` or `failed` event,
2. every checkpoint and every published version that is left holds finite values only, and no step was saved that the
   run called diverged,
3. the very command of the message, run as a command line, continues from a checkpoint, or from the model, and trains
   at least two more steps without an alarm that stops the run.

All runs share one process. A case is one line of `divergence.jsonl` in the current directory; a run that was
interrupted continues after the last one.

The cost is the share of a training step of a model with the sizes of SmolLM2-135M that is spent on the check for finite
values, and on the forward pass that measures the drift of the step: steps with both, and with neither, in turn.
"""

import gc
import json
import math
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from lab.figures import Figure, command_parser, machine, report
from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.errors import OffbeatError
from offbeat.objective.spec import Objective
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.quickstart import make_model
from offbeat.trainer.checkpoint import Checkpoint, saved_folders
from offbeat.trainer.checkpoint_files import read_rows
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Completion, Group, Prompt, Score
from offbeat.weights.subscriber import Subscription

STEPS: Final = 9
AT: Final = 3
"""Updates after which a value is written into the trainer's memory."""
DONE: Final = Path("divergence.jsonl")
Change = Callable[[MasterAdamW], None]


@dataclass(frozen=True)
class Way:
    """A way to diverge: settings, and what is written into memory after `AT` updates."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    """Called after every update from `AT` on."""
    gradient: float | None = None
    """Written into one gradient from update `AT` on."""


def write(kind: str, parameter: str, value: float) -> Change:
    """Return a change that writes a value into the first place of a tensor whose name contains `parameter`."""

    def change(optimizer: MasterAdamW) -> None:
        tensors = optimizer.tensors()
        name = next(name for name in tensors if name.startswith(f"{kind}/") and parameter in name)
        with torch.no_grad():
            tensors[name].view(-1)[0] = value
        optimizer.round_parameters()

    return change


def optimizer(rate: float, **more: Any) -> dict[str, Any]:
    return {"optimizer": {"learning_rate": rate} | more}


FLOAT32: Final = {"model": {"compute": "float32", "serve": "float32"}}
BF16: Final = {"model": {"compute": "bfloat16", "serve": "bfloat16"}}
LORA: Final = {"adapter": {"rank": 4}}
WAYS: Final = (
    Way("rate 1e6", optimizer(1e6)),
    Way("rate 1e6, bfloat16", optimizer(1e6) | BF16),
    Way("rate 1e6, adapter", optimizer(1e6) | LORA),
    Way("rate 1e6, adapter, bfloat16", optimizer(1e6) | LORA | BF16),
    Way("rate 1e38", optimizer(1e38)),
    Way("rate 1e3", optimizer(1e3)),
    Way("rate 1", optimizer(1.0)),
    Way("rate 0.1", optimizer(0.1)),
    Way("rate 0.01, four updates", optimizer(1e-2) | {"updates_per_batch": 4}),
    Way("rate 1, four updates, adapter", optimizer(1.0) | LORA | {"updates_per_batch": 4}),
    Way("warm-up that is too steep", optimizer(2e-2, warmup_steps=STEPS)),
    Way("rate 1e6, lag", optimizer(1e6) | {"sync": {"every": 4}}),
    Way("rate 1e6, concurrent", optimizer(1e6) | {"run": {"mode": "concurrent", "max_lag": 4}, "sync": {"every": 2}}),
    Way("rate 1, publish by drift", optimizer(1.0) | {"sync": {"drift_budget": 0.05}}),
    Way("rate 1, publish by cost", optimizer(1.0) | {"sync": {"by_cost": True}}),
    Way("rate 1e6, replay", optimizer(1e6) | {"sampler": {"mode": "replay"}, "run": {"max_lag": 50}}),
    Way("rate 1e6, no momentum", optimizer(1e6, betas=[0.0, 0.0])),
    Way("rate 0.1, no clipping", optimizer(0.1, max_grad_norm=1e30)),
    Way("weight decay of 2000", optimizer(1e-3, weight_decay=2e3)),
    Way("weight decay of 1e8", optimizer(1e-3, weight_decay=1e8)),
    Way("rate 0.1, temperature 0.01", optimizer(0.1) | {"sampling": {"max_tokens": 4, "temperature": 0.01}}),
    Way("NaN in a weight", change=write("master", "q_proj", math.nan)),
    Way("NaN in an embedding that no token uses", change=write("master", "embed_tokens", math.nan)),
    Way("infinite norm weight", change=write("master", "norm", math.inf)),
    Way("weight beyond bfloat16", BF16, write("master", "down_proj", 3.4e38)),
    Way("weight of 1e30", change=write("master", "lm_head", -1e30)),
    Way("NaN in an adapter", LORA, write("master", "lora_B", math.nan)),
    Way("NaN in the first moment", change=write("exp_avg", "k_proj", math.nan)),
    Way("infinite second moment", change=write("exp_avg_sq", "v_proj", math.inf)),
    Way("infinite second moment, adapter", LORA, write("exp_avg_sq", "lora_A", math.inf)),
    Way("infinite gradient", gradient=math.inf),
    Way("NaN in a gradient", gradient=math.nan),
    Way("gradient of 1e30, no clipping", {"optimizer": {"max_grad_norm": 1e38}}, gradient=1e30),
)
SHORT: Final = ("rate 1e6", "rate 0.1", "NaN in a weight", "infinite second moment, adapter")


def run_of(way: Way, model: Path) -> dict[str, Any]:
    """Return the settings of a run."""
    base: dict[str, Any] = {
        "steps": STEPS,
        "prompts_per_step": 8,
        "group_size": 8,
        "engine": {"kind": "hf", "max_prompt_tokens": 16},
        "sampling": {"max_tokens": 4},
        "optimizer": {"learning_rate": 1e-4},
        "objective": {"preset": "rec-oneside-nois"},
        "trainer": {"save_every": 1},
        "task": {"name": "arithmetic", "options": {"digits": 1}, "scorers": 1},
        "accept": True,
    } | FLOAT32
    settings = {**base, **way.settings}
    settings["optimizer"] = base["optimizer"] | settings["optimizer"]
    settings["model"] = {**settings["model"], "path": str(model)}
    return settings


def strike(way: Way) -> Any:
    """Return a patch of the optimizer under which a run diverges in this way."""
    update, norm = MasterAdamW.update, MasterAdamW.grad_norm

    def struck_update(self: MasterAdamW, step: int, known: float | None = None) -> float:
        rate = update(self, step, known)
        if way.change is not None and self.updates >= AT:
            way.change(self)
        return rate

    def struck_norm(self: MasterAdamW) -> float:
        if way.gradient is not None and self.updates >= AT:
            self._gradients()[0].view(-1)[0] = way.gradient
        return norm(self)

    return patch.multiple(MasterAdamW, update=struck_update, grad_norm=struck_norm)


def faults(way: Way, model: Path) -> list[str]:
    """Return what is not contained when a run diverges in this way."""
    with tempfile.TemporaryDirectory(prefix="divergence-") as scratch:
        directory = RunDirectory(Path(scratch) / "run")
        config = parse(run_of(way, model))
        directory.create(config)
        try:
            with strike(way):
                train(config, directory)
            return ["the run did not notice"]
        except OffbeatError as error:
            message = str(error)
        except Exception as error:
            return [f"no sentence: {type(error).__name__}: {error}"]
        events = list(read(directory.events))
        found = [] if {"alarm", "failed"} & {event["kind"] for event in events} else ["no event"]
        found += not_finite(directory)
        if not (command := re.search(r"offbeat (resume \S+ --from-step \d+( --set optimizer\.\S+)+)", message)):
            return [*found, f"no command in: {message}"]
        return found + continued(directory, shlex.split(command[1]))


def not_finite(directory: RunDirectory) -> list[str]:
    """Return what is not finite among saved tensors and published weights."""
    found = []
    for folder in saved_folders(directory.checkpoints):
        manifest = Checkpoint.open(folder).manifest
        for name, entry in manifest.tensors.items():
            rows = read_rows(folder, manifest, name, 0, entry.shape[0] if entry.shape else 1)
            if rows.is_floating_point() and not (rows.abs() < 1e5).all():
                found.append(f"{folder.name} has {name} beyond 1e5")
    with Subscription.open(directory.weights, name="lab") as policies:
        for version in policies.versions():
            weights = policies.fetch(version)
            found += [f"version {version} has {name}" for name, one in weights.items() if not one.isfinite().all()]
    return found[:3]


def continued(directory: RunDirectory, arguments: list[str]) -> list[str]:
    """Run the command and return what is wrong with the run that it continues."""
    before = len(list(read(directory.events)))
    steps = ["--steps", str(int(arguments[arguments.index("--from-step") + 1]) + 3)]
    result = CliRunner().invoke(app, [*arguments, *steps])
    events = list(read(directory.events))[before:]
    made = sum(event["kind"] == "step" for event in events)
    stopped = [event["says"] for event in events if event["kind"] == "alarm" and event["action"] == "stop"]
    found = [] if result.exit_code == 0 else [f"the command ended with {result.exit_code}: {result.output[-300:]}"]
    found += [] if made >= 2 else [f"{made} more steps"]
    return found + [f"stopped again: {one}" for one in stopped] + not_finite(directory)


SIZES: Final = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3}  # fmt: skip


def cost(pairs: int, *, short: bool) -> Figure:
    """Measure what the check adds to a step of a model of the size of SmolLM2-135M, with and without it in turn."""
    torch.manual_seed(0)
    sizes = SIZES | ({"num_hidden_layers": 1} if short else {})
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    policy_model = PolicyModel(model)
    settings = OptimizerSettings(Schedule(1e-7))
    trainer = Trainer(policy_model, MasterAdamW(policy_model, settings), StepSettings(Objective(), token_budget=1024))
    groups = [_group(n, *((2, 8) if short else (4, 64))) for n in range(2)]
    nothing = patch.object(Trainer, "_divergence", lambda *_: (0.0, ()))
    spent: dict[str, list[float]] = {"with": [], "without": []}
    finite = []
    for turn in range(pairs + 1):  # the first pair warms up
        for name in spent:
            began = time.perf_counter()
            if name == "with":
                done = trainer.train(groups)
            else:
                with nothing:
                    done = trainer.train(groups)
            assert isinstance(done, Trained)
            if turn:
                spent[name].append(time.perf_counter() - began)
        began = time.perf_counter()
        trainer.optimizer.overflows()
        finite.append(time.perf_counter() - began)
    ratios = sorted(a / b - 1 for a, b in zip(spent["with"], spent["without"], strict=True))
    share = median(finite[1:]) / median(spent["with"])
    return Figure(
        "trust.7.cost",
        "share of a training step of a model of 135 M parameters for the finite check and the drift of the step",
        "at most 0.05 of a step for the finite check",
        round(share, 4),
        "of a step",
        share <= 0.05,
        pairs,
        f"finite check alone; with the forward pass for the drift of the step {median(ratios):+.3f} "
        f"({ratios[0]:+.3f} to {ratios[-1]:+.3f}) of a step without both, which takes {median(spent['without']):.2f} s "
        f"for {sum(len(one.completions) for one in groups)} completions of {len(groups[0].completions[0].token_ids)} "
        f"tokens; larger batches have the same check; {machine()}",
    )


def _group(number: int, size: int, length: int) -> Group:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, 49152, (size, length), generator=generator).tolist()
    answers = tuple(
        Completion(f"g{number}/{i}", ids, np.full(length, -10.8, np.float32), score=Score(float(i % 2)))
        for i, ids in enumerate(tokens)
    )
    return Group(f"g{number}", Prompt(f"p{number}", np.arange(3, 35, dtype=np.int32), "made-up"), answers)


def contained(ways: tuple[Way, ...], *, record: bool) -> Figure:
    """Try every way that is not in `divergence.jsonl` yet."""
    known = {}
    if record and DONE.exists():
        known = {one["name"]: one["faults"] for one in map(json.loads, DONE.read_text().splitlines())}
    with tempfile.TemporaryDirectory(prefix="model-") as place:
        make_model(Path(place), steps=400, say=lambda line: None)
        for way in ways:
            if way.name in known:
                continue
            began = time.perf_counter()
            known[way.name] = faults(way, Path(place))
            print(f"{time.perf_counter() - began:5.1f} s  {way.name}: {known[way.name] or 'contained'}", flush=True)
            if record:
                with DONE.open("a") as file:
                    file.write(json.dumps({"name": way.name, "faults": known[way.name]}) + "\n")
            gc.collect()
    good = sum(not known[way.name] for way in ways)
    missed = "; ".join(f"{way.name}: {known[way.name][0]}" for way in ways if known[way.name])
    return Figure(
        "trust.7",
        "ways to diverge that end with a sentence, finite checkpoints and a command that continues",
        f"{len(ways)} of {len(ways)}",
        f"{good} of {len(ways)}",
        "ways",
        good == len(ways),
        len(ways),
        missed[:400],
    )


def main() -> bool:
    parser = command_parser(__doc__, short="four ways, and fewer repetitions")
    parser.add_argument("--only", default="", help="the ways whose name contains this text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only:
        return report(True, contained(tuple(way for way in WAYS if given.only in way.name), record=False))
    ways = tuple(way for way in WAYS if not given.short or way.name in SHORT)
    figures = [contained(ways, record=not given.short)]
    torch.set_num_threads(2)
    figures.append(cost(2 if given.short else 6, short=given.short))
    if not given.short:
        DONE.unlink(missing_ok=True)
    return report(given.short, *figures)


if __name__ == "__main__":
    sys.exit(not main())
