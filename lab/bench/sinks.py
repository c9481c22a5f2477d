"""A real run with every sink: what tensorboard, wandb, trackio and MLflow hold afterwards, against `events.jsonl`.

The run trains a tiny model for three steps, and three more after `offbeat resume`. Nothing leaves the machine.
"""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import cast

from lab.figures import ROOT, Figure, command_parser, machine, record
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.sinks import curves_of, plain_curves_of, values_of
from tests.fixtures import trackers
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.tiny_model import save_model
from tests.fixtures.trackers import Held

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow-skinny"}
CONFIG = """
steps = 3
prompts_per_step = 4
group_size = 4
[model]
path = "{model}"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
[sampling]
max_tokens = 5
[optimizer]
learning_rate = 1e-3
[objective]
zero_variance_mask = false
kl_coefficient = 0.01
[trainer]
save_every = 3
[task]
name = "{task}"
scorers = 1
[evaluation]
every = 3
prompts = 4
[run]
sinks = ["tensorboard", "wandb", "trackio", "mlflow"]
"""


def train_and_resume(place: Path) -> RunDirectory:
    """Run six steps in two processes, with the packages offline and their files in `place`."""
    os.environ |= {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(place / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db",
    }
    save_model(place / "model")
    task = ROOT / "tests" / "run" / "digits_task.py"
    (place / "run.toml").write_text(CONFIG.format(model=place / "model", task=task))
    run = place / "run"
    for command in (["train", str(place / "run.toml"), "--out", str(run)], ["resume", str(run), "--steps", "6"]):
        done = subprocess.run([OFFBEAT, *command], cwd=place, capture_output=True, text=True)
        print(done.stdout[-400:], done.stderr[-400:])
        done.check_returncode()
    return RunDirectory(run)


def expected(run: RunDirectory, *, plain: bool) -> dict[str, dict[int, float]]:
    """Return the curves that the journal holds, under their documented names."""
    curves: dict[str, dict[int, float]] = {}
    for event in read(run.events):
        step = cast(int, event.get("version", event["step"]))
        for name, number in (plain_curves_of if plain else curves_of)(values_of(event)).items():
            curves.setdefault(name, {})[step] = number
    return curves


def differences(wanted: Mapping[str, Mapping[int, float]], held: Held) -> list[str]:
    """Return the names whose numbers are not all there."""
    return [
        name
        for name, numbers in wanted.items()
        if not all(
            math.isclose(held.curves.get(name, {}).get(step, math.nan), number, rel_tol=1e-5, abs_tol=1e-12)
            for step, number in numbers.items()
        )
    ]


def figure(package: str, run: RunDirectory) -> Figure:
    """Compare what one package holds with the journal."""
    reader = getattr(trackers, package)
    held: Held = reader(run.path) if package in ("tensorboard", "wandb") else reader()
    wanted = expected(run, plain=package == "mlflow")
    wrong = differences(wanted, held)
    settings = run.config().settings
    tables = {setting.partition(".")[0] for setting in settings}
    config = settings.keys() <= held.config.keys() or tables <= held.config.keys()
    samples = "step" in held.samples and "reward" in held.samples
    numbers = sum(len(curve) for curve in wanted.values())
    return Figure(
        f"first-day.6.{package}",
        f"names of a run's metrics, TRL's copies included, that arrive in {package} with every number of every step; "
        "the run was resumed once",
        f"{len(wanted)} of {len(wanted)}, one run, configuration, samples",
        f"{len(wanted) - len(wrong)} of {len(wanted)}",
        "names",
        not wrong and held.runs == 1 and config and samples,
        numbers,
        f"{PACKAGES[package]} {version(PACKAGES[package])}, offline, read from its own files; {held.runs} run; "
        f"configuration {'there' if config else 'missing'}, samples {'there' if samples else 'missing'}. {machine()}."
        + (f" Missing: {', '.join(wrong)}." if wrong else ""),
    )


def main() -> int:
    """Train with every sink, and read the packages' files."""
    command_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = train_and_resume(Path(place))
        return 0 if record(*(figure(package, run) for package in PACKAGES)) else 1


if __name__ == "__main__":
    sys.exit(main())
