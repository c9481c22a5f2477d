"""Print the digests of two reference runs, so that a refactoring can show that it changed no bit.

    python -m lab.house.digests            this tree and an earlier commit; writes row rooms.3.digests
    python -m lab.house.digests --short    this tree only; records nothing

Both runs use the command line only, so the same script measures checkouts whose modules differ. Run one trains 20 steps
in lockstep with v = 1 and i = 1. Run two trains 20 steps with v = 4 and i = 2, but stops after 10 and resumes. A digest
covers every byte of the exported policy and the rewards of every step. About a minute.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from lab.house.earlier import BEFORE, earlier_checkout
from tests.fixtures.tiny_model import save_model

CONFIG = """
steps = 20
prompts_per_step = 4
group_size = 4
updates_per_batch = {updates}
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
engine.kind = "hf"
sampling.max_tokens = 5
sync.every = {every}
optimizer.learning_rate = 1e-3
objective = {{ preset = "rec-oneside-nois", zero_variance_mask = false }}
trainer.save_every = 5
task = {{ name = "{task}", scorers = 1 }}
"""


def offbeat(checkout: Path, *arguments: str) -> None:
    """Run the command line of a checkout."""
    command = [sys.executable, "-c", "from offbeat.cli.main import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True)


def digest(run: Path, exported: Path) -> str:
    """Hash the exported policy and the rewards of every step."""
    found = hashlib.sha256((exported / "model.safetensors").read_bytes())
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        if (event := json.loads(line))["kind"] == "step":
            found.update(json.dumps([event["step"], event["rewards"]]).encode())
    return found.hexdigest()[:16]


def measure(checkout: Path) -> dict[str, str]:
    """Train both runs in a temporary directory and return their digests."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "model").mkdir()
        save_model(root / "model")
        digests = {}
        for name, every, updates in (("synchronous", 1, 1), ("lagged and resumed", 4, 2)):
            run, file = root / name.replace(" ", "-"), root / f"{name}.toml"
            task = ROOT / "tests" / "run" / "digits_task.py"
            file.write_text(CONFIG.format(updates=updates, model=root / "model", every=every, task=task))
            first = "20" if name == "synchronous" else "10"
            offbeat(checkout, "train", str(file), "--out", str(run), "--set", f"steps={first}")
            if first == "10":
                offbeat(checkout, "resume", str(run), "--steps", "20")
            offbeat(checkout, "export", str(run), str(run / "exported"), "--dtype", "float32")
            digests[name] = digest(run, run / "exported")
        return digests


def main(short: bool) -> bool:
    """Print the digests, and record whether the earlier commit has the same."""
    now = measure(ROOT)
    for run, found in now.items():
        print(f"{found}  {run}")
    if short:
        return True
    with earlier_checkout() as before:
        then = measure(before)
    same = sum(then[run] == found for run, found in now.items())
    note = "; ".join(f"{run}: {then[run]} at {BEFORE}, {found} now" for run, found in now.items())
    what = f"reference runs whose policy and rewards have the same digest at {BEFORE} and now"
    return record(Figure("rooms.3.digests", what, "all", f"{same} of {len(now)}", "runs", same == len(now), 20, note))


if __name__ == "__main__":
    sys.exit(not main(command_parser(__doc__, short="this tree only; record nothing").parse_args().short))
