"""Try what a new user does first: install offbeat and run the quickstart.

python -m lab.site.user_path            a new environment, `pip install`, `offbeat quickstart`: rows user-path.1*,
                                        and docs/quickstart-transcript.txt; about 4 minutes
python -m lab.site.user_path --short    two steps in this environment; records nothing
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, machine, record

TRANSCRIPT = ROOT / "docs" / "quickstart-transcript.txt"
INSTALL = ("-c constraints.txt .[train,report]",)
"""README's command for a machine without a GPU."""


def quickstart(short: bool) -> bool:
    """Rows user-path.1*: the quickstart in a new environment."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        bin_ = Path(sys.executable).parent if short else install_into(Path(place) / "venv")
        installed = time.monotonic() - begun
        words = ["quickstart", *(["--steps", "2"] if short else [])]
        begun = time.monotonic()
        done = subprocess.run([bin_ / "offbeat", *words], cwd=place, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        output = done.stdout + (done.stderr if done.returncode else "")  # progress goes to stderr
        print(output)
        if short:
            return done.returncode == 0
        report = (Path(place) / "runs" / "quickstart" / "report.html").stat().st_size
    TRANSCRIPT.write_text(_transcript(output, seconds), encoding="utf-8")
    rates = re.search(r"pass rate ([\d.]+) -> ([\d.]+)", output)
    assert rates, "the quickstart did not print its pass rates"
    first, last = float(rates[1]), float(rates[2])
    trained_on = statistics.fmean(float(reward) for reward in re.findall(r"reward (\S+)", output)[-10:])
    note = f"installation {installed:.0f} s before; report {report} bytes; {machine()}; transcript in docs/"
    return record(
        Figure("user-path.1", "offbeat quickstart in a new environment, after installation", "<= 300 s",
               round(seconds, 1), "s", done.returncode == 0 and seconds <= 300, 1, note),
        Figure("user-path.1.before", "pass rate of the model it makes", "<= 0.5", first, "", first <= 0.5, 400),
        Figure("user-path.1.after", "pass rate on held-out prompts after training with lag up to 4", ">= 0.9", last,
               "", last >= 0.9, 400, f"on the training prompts of the last ten steps: {trained_on:.2f}"),
    )  # fmt: skip


def install_into(venv: Path) -> Path:
    """Make a new environment with offbeat in it, and return the directory of its programs."""
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    for what in INSTALL:
        subprocess.run([venv / "bin" / "pip", "install", "--quiet", *what.split()], cwd=ROOT, check=True)
    return venv / "bin"


def _transcript(output: str, seconds: float) -> str:
    commands = ["python -m venv venv", *(f"venv/bin/pip install {what}" for what in INSTALL), "offbeat quickstart"]
    return "".join(f"$ {line}\n" for line in commands) + output + f"\n({seconds:.0f} s on {os.cpu_count()} cores)\n"


if __name__ == "__main__":
    parser = command_parser(__doc__, short="train two steps in this environment; record nothing")
    sys.exit(not quickstart(parser.parse_args().short))
