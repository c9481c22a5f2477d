"""Measure the time from the command to the first step, and how much of the quickstart the loop itself takes.

    python -m lab.bench.start_up tiny          `offbeat train` of a tiny model without vLLM: row throughput.7.tiny;
                                               2 minutes
    python -m lab.bench.start_up vllm          SmolLM2-135M with vLLM, now and at an earlier commit, by turns: row
                                               throughput.7.vllm; 10 minutes
    python -m lab.bench.start_up quickstart    the loop's own share of `offbeat quickstart`: row
                                               throughput.7.quickstart; 10 minutes

Every run is a process of its own. The first run of each tree is not counted: it compiles bytecode and fills the page
cache. `--short` makes one counted run (of each tree) and a short quickstart, and records nothing.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final, cast

from lab.figures import ROOT, Figure, command_parser, machine, report
from lab.fixtures import smollm2
from lab.house.earlier import BEFORE, earlier_checkout
from offbeat.run.journal import Phase, read
from tests.fixtures.processes import OFFBEAT

RECIPES: Final = ROOT / "src" / "offbeat" / "recipes"
WAIT_SECONDS: Final = 900.0
TINY_GOAL: Final = 4.0
VLLM_GOAL: Final = 0.6
LOOP_GOAL: Final = 0.05


def tiny(short: bool) -> Figure:
    """Measure the quickstart's recipe on its own model, which is made before."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        model = Path(name) / "model"
        make = f"import offbeat; offbeat.tiny_model({str(model)!r})"
        subprocess.run([sys.executable, "-c", make], env=_environment(ROOT), check=True)
        rounds = 1 if short else 7
        runs = [_first_step(ROOT, "quickstart", model) for _ in range(1 + rounds)]
        imports = [_import_seconds() for _ in range(rounds)]
    took = [wall for wall, _ in runs[1:]]
    processor = median([cpu for _, cpu in runs[1:]])
    return Figure(
        "throughput.7.tiny", "command to first step, tiny model, engine hf", f"≤ {TINY_GOAL:g}",
        round(median(took), 2), "s", median(took) <= TINY_GOAL, len(took),
        f"median; {min(took):.2f} to {max(took):.2f} s; importing torch and transformers' Llama alone takes "
        f"{median(imports):.2f} s here; processor time of the whole run with its end {processor:.2f} s; {machine()}",
    )  # fmt: skip


def vllm(short: bool) -> Figure:
    """Measure the recipe smollm2-arithmetic, without evaluation, at both commits by turns."""
    model, rounds = smollm2.directory(), 1 if short else 5
    with earlier_checkout() as earlier:
        pairs = [
            (_first_step(earlier, "smollm2-arithmetic", model), _first_step(ROOT, "smollm2-arithmetic", model))
            for _ in range(1 + rounds)
        ][1:]
    before, now = ([pair[i][0] for pair in pairs] for i in (0, 1))
    processor = [median([pair[i][1] for pair in pairs]) for i in (0, 1)]
    ratios = [b / a for a, b in zip(before, now, strict=True)]
    ratio = median(now) / median(before)
    return Figure(
        "throughput.7.vllm", f"command to first step, SmolLM2-135M with vLLM: now ÷ commit {BEFORE}",
        f"≤ {VLLM_GOAL:g}", round(ratio, 2), "×", ratio <= VLLM_GOAL, len(pairs),
        f"medians {median(now):.1f} s ({min(now):.1f} to {max(now):.1f}) and {median(before):.1f} s "
        f"({min(before):.1f} to {max(before):.1f}), by turns; ratio of a pair {min(ratios):.2f} to {max(ratios):.2f}; "
        f"processor time of the whole run {processor[1]:.0f} and {processor[0]:.0f} s; recipe smollm2-arithmetic "
        f"without evaluation; imports and the start of vLLM are the same at both commits; {machine()}",
    )  # fmt: skip


def quickstart(short: bool) -> Figure:
    """Measure the stopwatch of `offbeat quickstart`: time that is no wait, training, publish, evaluation or save."""
    shares, phases = [], dict[str, float]()
    for _ in range(1 if short else 3):
        with tempfile.TemporaryDirectory(prefix="start-up-") as name:
            _run(ROOT, ["quickstart", "--out", name, *(["--steps", "20"] if short else [])], Path(name))
            [ended] = [event for event in read(Path(name) / "run" / "events.jsonl") if event["kind"] == "ended"]
        seconds = cast("dict[str, float]", ended["seconds"])
        shares.append(seconds[Phase.ITSELF] / sum(seconds.values()))
        for phase, spent in seconds.items():
            phases[phase] = phases.get(phase, 0.0) + spent
    parts = ", ".join(f"{phase} {spent / sum(phases.values()):.1%}" for phase, spent in phases.items())
    return Figure(
        "throughput.7.quickstart", "share of the loop itself in the quickstart's training", f"≤ {LOOP_GOAL:.0%}",
        round(100 * median(shares), 1), "%", median(shares) <= LOOP_GOAL, len(shares),
        f"median; {min(shares):.1%} to {max(shares):.1%}, by the run's stopwatch; all phases: {parts}; "
        f"what the loop does for a step costs the same for a model of any size, and this one is tiny; {machine()}",
    )  # fmt: skip


def _first_step(tree: Path, recipe: str, model: Path) -> tuple[float, float]:
    """Run one step of a recipe with the source of `tree`; return the seconds until its event, and processor seconds."""
    overrides = ["steps=1", f"model.path={model}", "evaluation.every=0"]
    with tempfile.TemporaryDirectory(prefix="start-up-", ignore_cleanup_errors=True) as name:
        out = Path(name) / "run"
        words = ["train", str(RECIPES / f"{recipe}.toml"), "--out", str(out)]
        begun, used = time.time(), _children_seconds()
        _run(tree, [*words, *(word for one in overrides for word in ("--set", one))], Path(name))
        at = next(cast("float", event["at"]) for event in read(out / "events.jsonl") if event["kind"] == "step")
    print(f"  {tree.name}, {recipe}: {at - begun:.2f} s", flush=True)
    return at - begun, _children_seconds() - used


def _run(tree: Path, words: list[str], place: Path) -> None:
    """Run a command of `tree` to its end. Raise with its last lines if it fails."""
    output = place / "output.txt"
    with output.open("w") as file:
        done = subprocess.run(
            [OFFBEAT, *words], env=_environment(tree), cwd=place, stdout=file, stderr=file, timeout=WAIT_SECONDS
        )
    if done.returncode:
        lines = output.read_text()[-3000:]
        raise AssertionError(f"offbeat {words[0]} of {tree} ended with {done.returncode}:\n{lines}")


def _environment(tree: Path) -> dict[str, str]:
    """Import offbeat from `tree`, and keep its bytecode as an installed package does."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_WAIT_POLICY": "passive"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _import_seconds() -> float:
    """Return the seconds of a process that imports what no run of a Llama can do without."""
    begun = time.perf_counter()
    program = "import torch, transformers; transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast"
    subprocess.run([sys.executable, "-c", program], env=_environment(ROOT), check=True)
    return time.perf_counter() - begun


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


PARTS: Final = {"tiny": tiny, "vllm": vllm, "quickstart": quickstart}


def main() -> bool:
    parser = command_parser(__doc__, short="one counted run, a short quickstart")
    parser.add_argument("part", choices=[*PARTS])
    arguments = parser.parse_args()
    return report(arguments.short, PARTS[arguments.part](arguments.short))


if __name__ == "__main__":
    sys.exit(not main())
