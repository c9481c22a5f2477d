"""Every arm of `offbeat reproduce p1` and `p2` end to end on a CPU, and their plans and hours for GPUs.

    python -m lab.learning.reproduce_arms arms     SmolLM2-135M, two steps an arm; writes rows transfer.6.p1 and .p2
    python -m lab.learning.reproduce_arms plans    no training; writes rows transfer.6.plans and .hours
    python -m lab.learning.reproduce_arms --short  one arm of each paper and the plans, nothing recorded

The arms train with transformers on sums in the form of GSM8K, of which the model gets some right: without any reward
that differs, the zero-variance mask would leave nothing to train on. What they reach means nothing. A killed command
continues after the finished arms. The plans are made for models of the right shape without weights.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Final

from lab.figures import ROOT, Figure, command_parser, machine, report
from lab.fixtures import smollm2
from offbeat.papers import PAPERS
from offbeat.placement.shape import ModelShape

SMALL: Final = (
    "engine.kind=hf", "engine.max_prompt_tokens=64", "prompts_per_step=2", "group_size=2", "sampling.max_tokens=8",
    "sampling.temperature=1.0", "sampler.refill_limit=100", "workers.groups_at_once=2", "evaluation.prompts=2",
    "trainer.token_budget=128", "trainer.checkpoint_activations=false", "task.scorers=1",
    "task.options.instruction=Answer with the number alone.",
)  # fmt: skip
PLACE: Final = smollm2.CACHE.parent / "reproduce-arms"
"""Where the runs are until all arms are finished."""
SHAPES: Final = {"p1": "qwen2.5-1.5b", "p2": "qwen2.5-0.5b"}
"""The config.json of each paper's model, in tests/placement/models."""
HARDWARE: Final = ("1x24", "1x48")
EVENING: Final = 5.0
"""Hours."""


def main() -> bool:
    parser = command_parser(__doc__, short="one arm of each paper and the plans; record nothing")
    parser.add_argument("part", nargs="?", choices=("arms", "plans"), help="default: both")
    args = parser.parse_args()
    held = True
    if args.part != "plans":
        for name in PAPERS:
            held &= report(args.short, arms(name, short=args.short))
    if args.part != "arms":
        held &= report(args.short, *plans())
    return held


def arms(paper: str, *, short: bool) -> Figure:
    """Run the arms of a paper, and count those that are finished in its table."""
    names = [*PAPERS[paper].arms][: 1 if short else None]
    place = PLACE / ("short" if short else "all") / paper
    place.mkdir(parents=True, exist_ok=True)
    for split, first in (("train", 0), ("test", 5)):
        rows = [{"question": f"What is {a}+{b}?", "answer": f"#### {a + b}"} for a in range(10)
                for b in range(first, first + 5)]  # fmt: skip
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = [word for one in (*SMALL, f"task.options.source={place}") for word in ("--set", one)]
    options = ["--arms", ",".join(names), "--model", str(smollm2.directory()), "--steps", "2", *settings]
    done = _offbeat("reproduce", paper, *options, "--out", str(place / "runs"))
    print(done.stdout[-3000:])
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    shutil.rmtree(place)
    ends = [rf"^{name} +1 +2 +\d\.\d+ +\d\.\d+ +\d\.\d+ \[" for name in names]
    finished = sum(bool(re.search(end, done.stdout, re.M)) for end in ends)
    what = f"arms of `offbeat reproduce {paper}` that train and are evaluated to the end and stand in the table"
    note = f"SmolLM2-135M with transformers, 2 steps, sums in the form of GSM8K; no GPU of ours has run it; {machine()}"
    held = finished == len(names)
    return Figure(
        f"transfer.6.{paper}", what, f"{len(names)} of {len(names)}", finished, "arms", held, len(names), note
    )


def plans() -> list[Figure]:
    """Plan all arms for both GPUs, at the papers' length and for an evening."""
    hours, refused, planned = dict[tuple[str, str, bool], float](), list[str](), 0
    for paper, gpus, short in product(PAPERS, HARDWARE, (False, True)):
        with tempfile.TemporaryDirectory() as place:
            model = without_weights(Path(place, "model"), SHAPES[paper])
            options = ["--plan", "--gpus", gpus, "--model", str(model), *(["--short"] if short else [])]
            done = _offbeat("reproduce", paper, *options, "--out", f"{place}/out")
        print(f"\n{paper} {gpus}{' --short' if short else ''}\n{done.stdout}{done.stderr}")
        found = re.findall(r"^\S+: about ([\d.]+) h a seed; ", done.stdout, re.M)
        assert found or "nearest that fits: use" in done.stdout, "neither a plan nor what would fit"
        if not short:
            planned += len(found)
            refused += [] if found else [f"{paper} on {gpus}"]
        if found:
            hours[paper, gpus, short] = sum(map(float, found))
    cells = len(HARDWARE) * sum(len(paper.arms) for paper in PAPERS.values())
    why = (
        f"; {', '.join(refused)}: weights, AdamW and gradients alone need more, and it names what fits"
        if refused
        else ""
    )
    short_hours = [value for (_, _, short), value in hours.items() if short]
    listed = "; ".join(f"{paper} {gpus}{' --short' if short else ''} {value:.1f} h" for (paper, gpus, short), value
                       in hours.items())  # fmt: skip
    return [
        Figure("transfer.6.plans", "arms × hardware (1x24, 1x48) that have a device plan", f"{cells} of {cells}",
               planned, "plans", planned == cells, cells, f"the papers' models by their shape alone{why}"),
        Figure("transfer.6.hours", "hours that `--plan` estimates for one seed of all arms with --short, the longest",
               f"<= {EVENING:g}", max(short_hours), "h", max(short_hours) <= EVENING, len(hours),
               f"arithmetic at 100 TFLOP/s, every answer as long as allowed; {listed}"),
    ]  # fmt: skip


def without_weights(place: Path, shape: str) -> Path:
    """Make a model directory that can be planned with: its weights are a hole of the right size."""
    place.mkdir()
    config = json.loads((ROOT / "tests" / "placement" / "models" / f"{shape}.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (place / "tokenizer.json").write_text("{}", encoding="utf-8")
    count = ModelShape.from_config(config).parameters
    header = json.dumps({"all": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * count)
    return place


def _offbeat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "offbeat", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


if __name__ == "__main__":
    sys.exit(not main())
