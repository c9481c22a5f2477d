"""Is the policy that is evaluated and exported the one that was served? Do all numbers of ranks start alike?

    python -m lab.parity.served            four runs, and 1, 2 and 3 ranks: rows transfer.2.served, transfer.2.ranks;
                                           3 minutes
    python -m lab.parity.served --short    one run, and 1 and 2 ranks; nothing recorded

A run of a tiny model, whose file is float32, publishes every step. Then the newest version of its weight log is
compared with what `offbeat eval`, `Run.policy()` and an export in float32 compute with: every bit of every weight, and
the log-probs of the version's probe, both computed by transformers in float32; `tests/run/test_served.py` does the same
with two ranks on Ray. What `offbeat eval` takes for the model before training is compared with version 0.

Ranks are processes that talk by gloo. Each number of them loads the same float32 files for training in bfloat16, with
dithered masters and without, all weights and an adapter.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

import offbeat
from lab.figures import Figure, command_parser, report
from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation import model as evaluation
from offbeat.run.learner import make_trainer
from offbeat.trainer.checkpoint import Checkpoint
from offbeat.trainer.export import export, find_checkpoint, logprobs_of
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.loading import read_model
from offbeat.types import Json
from offbeat.weights.probe import Probe
from offbeat.weights.subscriber import Subscription
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.ranks import run_ranks
from tests.fixtures.runs import DIGITS_TASK, scratch
from tests.fixtures.tiny_model import save_model

CONFIG: Final = f"""
steps = 3
prompts_per_step = 4
group_size = 4
engine.kind = "hf"
sampling.max_tokens = 5
optimizer.learning_rate = 1e-3
objective = {{ preset = "rec-oneside-nois", zero_variance_mask = false }}
task = {{ name = "{DIGITS_TASK}", scorers = 1 }}
"""
RUNS: Final = {
    "float32, served in bfloat16": ("model.compute=float32", "model.serve=bfloat16"),
    "float32, served in float16": ("model.compute=float32", "model.serve=float16"),
    "bfloat16": (),
    "bfloat16, served in float32": ("model.serve=float32",),
}
STARTS: Final = tuple(
    {"optimizer": {"dither": dither}, "adapter": {"rank": rank}} for dither in (True, False) for rank in (0, 4)
)
Bits = dict[str, torch.Tensor]


def trained(place: Path, settings: Sequence[str]) -> offbeat.Run:
    """Train the run of `CONFIG` with these settings, from a model in float32."""
    save_model(place / "model")
    (place / "run.toml").write_text(CONFIG, encoding="utf-8")
    words = [OFFBEAT, "train", str(place / "run.toml"), "--out", str(place / "run")]
    for setting in (f"model.path={place / 'model'}", *settings):
        words += ["--set", setting]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{settings} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return offbeat.Run(place / "run")


def published(run: RunDirectory, version: int | None = None) -> tuple[PreTrainedModel, Probe]:
    """Load a version of the weight log, by default the newest, as engines have it; return it with its probe."""
    with Subscription.open(run.weights, name="served") as reader:
        newest = reader.versions()[-1] if version is None else version
        probe, state = reader.probe(newest), {name: one.float() for name, one in reader.fetch(newest).items()}
    assert probe is not None
    model = read_model(run.config().model.directory(), torch.float32)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model.eval(), probe


def evaluated(run: RunDirectory) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Run `offbeat eval`; return the models that it asks: the policy, and the model before training."""
    with _asked() as models:
        done = CliRunner().invoke(app, ["eval", str(run.path), "--prompts", "2", "--samples", "1"])
    assert done.exit_code == 0, done.output
    policy, before = models
    return policy, before


@contextmanager
def _asked() -> Iterator[list[PreTrainedModel]]:
    models: list[PreTrainedModel] = []
    sampler: Callable[..., evaluation.ModelSampler] = evaluation.policy_sampler

    def keep(model: PreTrainedModel, *settings: Any) -> evaluation.ModelSampler:
        models.append(model)
        return sampler(model, *settings)

    with patch.object(evaluation, "policy_sampler", keep):
        yield models


def used(run: offbeat.Run, place: Path) -> dict[str, PreTrainedModel]:
    """Return the policy of a run by each of the ways to it."""
    export(run.path, place / "exported", dtype=torch.float32)
    return {
        "offbeat eval": evaluated(run.directory)[0],
        "Run.policy()": run.policy(),
        "offbeat export --dtype float32": read_model(place / "exported").eval(),
    }


def bits(model: PreTrainedModel) -> Bits:
    return {name: one.detach() for name, one in model.named_parameters()}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> int:
    """Return how many values differ."""
    assert one.keys() == other.keys()
    return sum(int((one[name] != other[name]).sum()) for name in one)


def masters(run: RunDirectory) -> Bits:
    """Return what the optimizer of the newest checkpoint moves."""
    return dict(Checkpoint.open(find_checkpoint(run.path)).policy())


def first_masters(ranks: Ranks, directory: str, starts: Sequence[Mapping[str, Any]]) -> Json:
    """Build the trainer of a run for each of these settings; return the sha256 of every whole master."""
    torch.set_num_threads(1)
    found: list[Json] = []
    for settings in starts:
        config = parse({"model": {"path": directory}, "engine": {"kind": "hf"}, **settings})
        state = make_trainer(config, ranks).optimizer.tensors()
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items() if "master/" in n}
        found.append({name: sha256(value.numpy().tobytes()).hexdigest() for name, value in whole.items()})
    return found


def served_figure(runs: Mapping[str, Sequence[str]]) -> Figure:
    """Compare the policy of each run with what it served."""
    different, logprobs, compared, rounded = 0, 0, 0, 0
    for settings in runs.values():
        with scratch() as place:
            run = trained(place, settings)
            (served, probe), (first, _) = published(run.directory), published(run.directory, 0)
            for policy in used(run, place).values():
                different += differing(bits(policy), bits(served))
                logprobs += int((logprobs_of(policy, probe) != logprobs_of(served, probe)).sum())
                compared += served.num_parameters()
            different += differing(bits(evaluated(run.directory)[1]), bits(first))
            rounded += differing(masters(run.directory), bits(served))
    what = "values of the policy that `offbeat eval`, `Run.policy()` and an export in float32 have, beside the version"
    return Figure(
        "transfer.2.served",
        f"{what} served last: different",
        "0",
        different + logprobs,
        "values and log-probs",
        different + logprobs == 0,
        compared,
        f"runs: {'; '.join(runs)}; {rounded} of their {compared // 3} float32 masters differ from what was served",
    )


def ranks_figure(sizes: Sequence[int]) -> Figure:
    """Compare the masters that different numbers of ranks start from."""
    with scratch() as place:
        save_model(place)
        found = [first for n in sizes for first in run_ranks(first_masters, n, (str(place), STARTS))]
    assert isinstance(found[0], list)
    tensors = sum(len(one) for one in found[0] if isinstance(one, dict))
    wrong = sum(one != found[0] for one in found)
    return Figure(
        "transfer.2.ranks",
        f"gloo ranks, alone or {' or '.join(map(str, sizes[1:]))} together, whose first masters from files in float32 "
        "have other bits than those of one rank",
        "0",
        wrong,
        "ranks",
        wrong == 0,
        len(found),
        f"trained in bfloat16, with dithered masters and without, all weights and an adapter: {tensors} tensors each",
    )


if __name__ == "__main__":
    short = command_parser(__doc__, short="one run and two numbers of ranks; keep nothing").parse_args().short
    some = dict(list(RUNS.items())[:1]) if short else RUNS
    raise SystemExit(not report(short, served_figure(some), ranks_figure((1, 2) if short else (1, 2, 3))))
