"""Type fifteen lines of Python in a new environment: own reward, own rows, a tiny model; trained, plotted, exported.

    python -m lab.site.python_path     a new environment, `pip install`, the script three times; then the notebooks, and
                                       `train` inside a running event loop: rows first-day.2.*; a quarter of an hour

`--short` records nothing: the script runs once, for two steps, in this environment.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.figures import Figure, command_parser, machine, record
from lab.fixtures.pytest_runs import run_tests
from lab.site.user_path import install_into

SCRIPT = """\
import offbeat

def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
model = offbeat.tiny_model("tiny-model")
run = offbeat.train(model, correct, rows, steps=100, max_tokens=4, learning_rate=4e-4, out="run")
print(run.metrics[["reward_mean", "grad_norm"]].tail())
run.plot("reward_mean", to="curve.svg")
print(run.generate("3+4=", samples=4))
run.report()
run.export("trained")
"""
LIMIT = 180.0
TIMES = 3


def main() -> bool:
    parser = command_parser(__doc__, short="two steps in this environment")
    short = parser.parse_args().short
    assert len(SCRIPT.splitlines()) <= 15
    with tempfile.TemporaryDirectory() as place:
        python = Path(sys.executable) if short else install_into(Path(place) / "venv") / "python"
        seconds, rewards = [], []
        for number in range(1 if short else TIMES):
            spent, reward = _typed(python, Path(place) / str(number), short)
            seconds.append(spent)
            rewards.append(reward)
    if short:
        return True
    median = statistics.median(seconds)
    notebooks, loop = (
        run_tests("-m", "engine", "tests/test_notebooks.py"),
        run_tests("-m", "engine", "tests/test_api.py", "-k", "event_loop"),
    )
    note = f"{', '.join(f'{one:.0f} s' for one in seconds)}; rewards at the end {rewards}; {machine()}"
    return record(
        Figure("first-day.2.script", "own reward, own rows, tiny model, a new environment: trained, plotted, exported",
               "<= 180 s, median", round(median, 1), "s", median <= LIMIT and min(rewards) > 0.7, TIMES, note),
        Figure("first-day.2.notebooks", "notebooks of examples/ that run from top to bottom", "3 of 3",
               f"{notebooks.passed - 1} of 3", "", notebooks.ok and notebooks.passed == 4, 3,
               "" if notebooks.ok else f"{', '.join(notebooks.failures)}; {machine()}"),
        Figure("first-day.2.loop", "offbeat.train inside a running event loop", "finishes",
               "finishes" if loop.ok else "fails", "", loop.ok and loop.passed > 0, 1),
    )  # fmt: skip


def _typed(python: Path, place: Path, short: bool) -> tuple[float, float]:
    """Run the script in a new directory; return its seconds and the mean reward of the last five steps."""
    place.mkdir()
    script = SCRIPT.replace("steps=100", "steps=2") if short else SCRIPT
    (place / "mine.py").write_text(script)
    begun = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    subprocess.run([python, "mine.py"], cwd=place, check=True, env=os.environ if short else environment)
    seconds = time.monotonic() - begun
    assert (place / "curve.svg").stat().st_size and (place / "trained" / "config.json").is_file()
    code = "import offbeat; print(offbeat.Run('run').metrics['reward_mean'].tail(5).mean())"
    shown = subprocess.run([python, "-c", code], cwd=place, check=True, capture_output=True, text=True)
    return seconds, round(float(shown.stdout), 3)


if __name__ == "__main__":
    sys.exit(not main())
