"""Is an adapter trained as plain peft would train it, bit for bit after a resume and against an independent loop?

python -m lab.lora.exactness gradients    a minute; writes row lora.1.gradients
python -m lab.lora.exactness resume       a minute; writes row lora.1.resume
python -m lab.lora.exactness loop         half a minute; writes row lora.1.loop
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from lab.figures import ROOT, Figure, command_parser, record
from lab.fixtures.pytest_runs import run_tests
from offbeat.trainer.adapter import stored_name
from offbeat.trainer.checkpoint import Checkpoint, Checkpoints
from tests.fixtures.adapters import SPEC, adapter_gradients, naive_gradients, random_adapter, relative, with_peft
from tests.fixtures.ranks import run_ranks
from tests.fixtures.small_trainer import digest_of, small_batch, small_model, small_trainer

STEPS = 20
LOOP = "tests/fixtures/reference_loop.py"
TEST = "tests/run/test_adapter.py"


def gradients() -> bool:
    """Compare one step's gradients, with one rank and with two, with those of autograd through plain peft."""
    found = {}
    for tied in (True, False):
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as place:
                small_model(tied=tied).save_pretrained(f"{place}/model")
                run_ranks(adapter_gradients, ranks, (f"{place}/model", "reinforce", f"{place}/found"))
                ours = {stored_name(n.removeprefix("model.")): g for n, g in load_file(f"{place}/found").items()}
                plain = with_peft(small_model(tied=tied), random_adapter(small_model(tied=tied)), Path(place) / "peft")
                found[tied, ranks] = relative(ours, naive_gradients(plain, small_batch(0)))
    note = ", ".join(f"{'tied' if tied else 'untied'} head, {n} rank(s): {gap:.1e}" for (tied, n), gap in found.items())
    worst = max(found.values())
    return record(
        Figure(
            "lora.1.gradients",
            "norm of the difference between the gradients of A and B and those of plain peft and autograd, one "
            "completion at a time, relative to their norm; float32",
            "≤ 1e-6",
            float(f"{worst:.2g}"),
            "",
            worst <= 1e-6,
            len(found),
            f"{note}; shared prefixes, several micro-batches, preset reinforce",
        )
    )


def resume() -> bool:
    """Restore a new trainer from the checkpoint of every step, and train it to the end."""
    torch.set_num_threads(1)
    same = 0
    with tempfile.TemporaryDirectory() as place, Checkpoints(place, config=None, keep=STEPS) as checkpoints:
        trainer = small_trainer(adapter=SPEC)
        for step in range(STEPS):
            checkpoints.save(trainer, {})
            trainer.train(small_batch(step))
        checkpoints.wait()
        for step in range(STEPS):
            again = small_trainer(adapter=SPEC)
            Checkpoint.open(Path(place) / f"step-{step:010}").restore(again)
            for later in range(step, STEPS):
                again.train(small_batch(later))
            same += digest_of(again) == digest_of(trainer)
    return record(
        Figure(
            "lora.1.resume",
            "trainers restored from the checkpoint of another step that end with the same bits: A, B, moments",
            f"{STEPS} of {STEPS}",
            f"{same} of {STEPS}",
            "trainers",
            same == STEPS,
            STEPS,
            f"restored at step 0 to {STEPS - 1}, trained to step {STEPS}; {TEST} stops and resumes a whole run",
        )
    )


def loop() -> bool:
    """Run the test that compares a lockstep run with the independent loop."""
    done = run_tests("-m", "engine", TEST, "-k", "independent_loop")
    same = (done.passed, done.failed) == (1, 0)
    lines = len((ROOT / LOOP).read_text(encoding="utf-8").splitlines())
    return record(
        Figure(
            "lora.1.loop",
            "lockstep steps after which A and B equal those of an independent loop around plain peft, bit for bit",
            str(STEPS),
            STEPS if same else 0,
            "steps",
            same,
            STEPS,
            f"{LOOP}, {lines} lines: its own loop, loss, first A and optimizer; engine and forward pass are shared",
        )
    )


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("part", choices=["gradients", "resume", "loop"])
    return {"gradients": gradients, "resume": resume, "loop": loop}[parser.parse_args().part]()


if __name__ == "__main__":
    sys.exit(not main())
