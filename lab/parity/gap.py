"""Does `offbeat gap` find mismatches that were put in? Small runs whose engine is wrong in a known way.

    python -m lab.parity.gap           writes rows transfer.7.*
    python -m lab.parity.gap --short   fewer steps; records nothing

    bf16     an engine that rounds weights to bfloat16 and computes in it, beside a trainer in float32
    late     an engine that generates with the weights of one version earlier than it says
    both     both at once
    fitted   a bf16 engine and v = 4: lag at steps whose policy was neither published nor saved, against the checkpoints

For the first three, the truth is computed without offbeat's forward pass: plain transformers with the files of the
weight log, in float64 for the trainer, and for the engine with the weights and the dtype that it really had. About two
minutes.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lab.figures import ROOT, Figure, command_parser, report
from offbeat import Config, Run
from offbeat.config import parse
from offbeat.experience.reader import LogReader
from offbeat.reports.gap import GapReport
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
from offbeat.types import Completion, Group
from tests.fixtures.runs import DIGITS_TASK
from tests.fixtures.tiny_model import save_llama

ENGINES: Final = ROOT / "tests" / "fixtures" / "mismatched_engines.py"
TEMPERATURE: Final = 0.8
GOAL: Final = 0.10
"""The largest relative error."""


@dataclass(frozen=True)
class Mismatch:
    """What an engine does, as the truth is computed."""

    engine: str
    dtype: torch.dtype
    late: int
    """How many versions earlier its weights are."""
    what: str


MISMATCHES: Final = {
    "bf16": Mismatch("Bfloat16Engine", torch.bfloat16, 0, "bf16 engine beside a float32 trainer"),
    "late": Mismatch("LateEngine", torch.float32, 1, "engine with weights one version late"),
    "both": Mismatch("LateBfloat16Engine", torch.bfloat16, 1, "bf16 engine with weights one version late"),
}
PARTS: Final = (
    "mean |Δlogp| of the engine",
    "mean |Δlogp| of lag",
    "mean (1 − ρ)₊ of the engine",
    "mean (1 − ρ)₊ of lag",
)


def settings(model: Path, engine: str, steps: int, **changes: object) -> Config:
    """Return a run with one engine of tests/fixtures/mismatched_engines.py, trained at a lag of 3."""
    return parse({
        "steps": steps,
        "prompts_per_step": 4,
        "group_size": 4,
        "model": {"path": str(model), "compute": "float32", "serve": "float32"},
        "engine": {"kind": f"{ENGINES}:{engine}"},
        "sampling": {"max_tokens": 12, "temperature": TEMPERATURE},
        "optimizer": {"learning_rate": 1e-3},
        "objective": {"preset": "rec-oneside-nois", "zero_variance_mask": False},
        "task": {"name": str(DIGITS_TASK), "scorers": 1},
        "sync": {"every": 1, "offset": 3, "anchor_every": 1},
    } | changes)  # fmt: skip


def train_run(config: Config, place: Path) -> Run:
    """Train it in this process."""
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory)
    return Run(place)


def found_parts(found: GapReport) -> list[float]:
    """Return what the command says, in the order of `PARTS`."""
    engine, lag = found.total.engine, found.total.lagged
    assert lag is not None
    return [engine.size, lag.size, engine.tv, lag.tv]


def true_parts(run: Run, model: Path, mismatch: Mismatch) -> tuple[list[float], int]:
    """Return the truth, in the order of `PARTS`, and the tokens behind it."""
    states = {int(file.name[:10]): load_file(file) for file in (run.directory.weights / "data").glob("*.safetensors")}
    under = _policies(model, states)
    reader = LogReader.open(run.directory.experience)
    engine, lag = [], []
    for name, fate in reader.ledger().fates.items():
        for step in fate.steps:
            [group] = reader.read([name])
            for one in group.completions:
                version = one.versions[0].version
                trainer = under(version, torch.float64, group, one)
                engine.append(trainer - under(max(version - mismatch.late, 0), mismatch.dtype, group, one))
                lag.append(under(step - 1, torch.float64, group, one) - trainer)
    both = [torch.cat(engine), torch.cat(lag)]
    sizes, shortfalls = [one.abs().mean() for one in both], [(1 - one.exp()).clamp(min=0).mean() for one in both]
    return [float(one) for one in (*sizes, *shortfalls)], len(both[0])


def _policies(model: Path, states: Mapping[int, dict[str, Tensor]]) -> Callable[..., Tensor]:
    """Return a function that computes the log-probs of a completion under a version, in a dtype."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made: dict[tuple[int, torch.dtype], torch.nn.Module] = {}

    @torch.no_grad()
    def under(version: int, dtype: torch.dtype, group: Group, one: Completion) -> Tensor:
        if (version, dtype) not in made:
            network = copy.deepcopy(loaded)
            network.load_state_dict(states[version])
            made[version, dtype] = network.to(dtype).eval()
        ids = torch.tensor([*group.prompt.token_ids.tolist(), *one.token_ids.tolist()])
        logits = made[version, dtype](ids[None]).logits[0, len(group.prompt.token_ids) - 1 : -1]
        wide = torch.promote_types(dtype, torch.float32)
        logprobs = (logits.to(wide) / TEMPERATURE).log_softmax(-1)
        chosen: Tensor = logprobs.gather(1, torch.tensor(one.token_ids.tolist())[:, None])[:, 0]
        return chosen.double()

    return under


def injected(name: str, steps: int, place: Path) -> Figure:
    """Train with a wrong engine and compare what the command says with the truth."""
    mismatch, model = MISMATCHES[name], place / "model"
    save_llama(model, tied=False)
    run = train_run(settings(model, mismatch.engine, steps), place / "run")
    found = run.gap(groups=1000)
    truth, tokens = true_parts(run, model, mismatch)
    note = (
        f"float32 trainer, v = 1, lag up to 3, temperature {TEMPERATURE}; {found.total.tokens} tokens computed again; "
    )
    note += f"the verdict names late weights: {found.late}"
    figure = compared(f"transfer.7.{name}", mismatch.what, found_parts(found), truth, tokens, note)
    print(f"{found}\n")
    return figure


def fitted(steps: int, place: Path) -> Figure:
    """Compare lag that is fitted with lag from checkpoints, on the same run."""
    model = place / "model"
    save_llama(model, tied=False)
    saved = {"sync": {"every": 4}, "trainer": {"save_every": 1, "keep": steps + 1}}
    run = train_run(settings(model, "Bfloat16Engine", steps, **saved), place / "run")
    truth = found_parts(run.gap(groups=1000))
    for folder in sorted(run.directory.checkpoints.glob("step-*"))[:-1]:
        shutil.rmtree(folder)
    found = run.gap(groups=1000)
    print(f"{found}\n")
    what = "run with v = 4, π_k neither published nor saved"
    (*_, engine, lag), (_, size, *right) = found_parts(found), truth
    note = f"{found.sources.get('fitted', 0)} of {found.total.tokens} tokens fitted; truth from checkpoints of every "
    note += f"step; mean |Δlogp| of lag is not fitted: {found_parts(found)[1]:.3g}, truth {size:.3g}"
    return compared("transfer.7.fitted", what, [engine, lag], right, found.total.tokens, note, PARTS[2:])


def compared(
    row: str, what: str, found: list[float], truth: list[float], tokens: int, note: str, parts: Sequence[str] = PARTS
) -> Figure:
    """Return the figure: the largest relative error of these numbers."""
    errors = [abs(one - right) / right for one, right in zip(found, truth, strict=True)]
    each = "; ".join(
        f"{part} {one:.3g}, truth {right:.3g}" for part, one, right in zip(parts, found, truth, strict=True)
    )
    return Figure(
        row, f"`offbeat gap`, {what}: largest relative error of both parts", f"<= {GOAL:.0%}",
        f"{max(errors):.1%}", "of the truth", max(errors) <= GOAL, tokens, f"{each}; {note}",
    )  # fmt: skip


def main() -> None:
    """Measure the mismatches, each in a run of its own."""
    asked = command_parser(__doc__, short="fewer steps; records nothing").parse_args()
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory() as place:
        for name in MISMATCHES:
            figures.append(injected(name, 6 if asked.short else 12, Path(place) / name))
        figures.append(fitted(9 if asked.short else 17, Path(place) / "fitted"))
    report(asked.short, *figures)


if __name__ == "__main__":
    main()
