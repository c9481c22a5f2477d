"""Install a clean clone, and run there what CI runs.

python -m lab.bench.foundation    a light install in a new virtual environment, then .ci/run: rows foundation.6.*;
                                  about 45 minutes
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from lab.figures import ROOT, Figure, command_parser, commit, machine, record


def install() -> bool:
    """Rows foundation.6.*."""
    home, cloned = Path(tempfile.mkdtemp()), commit()  # the repository may move on during the run
    load_before = machine()
    clone = home / "offbeat"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    venv = home / "light"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", str(clone)], check=True)
    times = []
    for _ in range(11):
        start = time.perf_counter()
        subprocess.run([python, "-c", "import offbeat.config"], check=True)
        times.append(time.perf_counter() - start)
    without_torch = subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0
    help_answers = subprocess.run([str(venv / "bin" / "offbeat"), "--help"], capture_output=True).returncode == 0
    # Tests read data from ../shared if it exists, so the clone gets it at the same place.
    if (ROOT.parent / "shared").exists():
        (home / "shared").symlink_to(ROOT.parent / "shared")
    environment = {k: v for k, v in os.environ.items() if k != "OFFBEAT_VENV"}
    start = time.perf_counter()
    done = subprocess.run(["bash", ".ci/run"], cwd=clone, env=environment, capture_output=True, text=True)
    minutes = (time.perf_counter() - start) / 60
    print(done.stdout[-1500:], done.stderr[-1500:])
    shutil.rmtree(home)
    return record(
        Figure(
            "foundation.6.import",
            "import offbeat.config after a light install, whole process, median",
            "< 0.5 s, torch not installed, offbeat --help answers",
            round(median(times), 3),
            "s",
            median(times) < 0.5 and without_torch and help_answers,
            len(times),
            f"range {min(times):.3f} to {max(times):.3f} s; without torch: {without_torch}; --help: {help_answers}; "
            f"{load_before}",
        ),
        Figure(
            "foundation.6.clone",
            "scripts/check --engine by .ci/run on a clean clone in a new virtual environment",
            "passes, well under 90 minutes",
            round(minutes, 1),
            "minutes",
            done.returncode == 0 and minutes < 45,
            1,
            f"clone of {cloned}; installation included; packages come from a nearby cache; at the start {load_before}, "
            f"at the end {machine()}{why_it_failed(done)}",
        ),
    )


def why_it_failed(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the tests that failed, or else the last line that was printed; nothing after success."""
    if done.returncode == 0:
        return ""
    if tests := re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE):
        return f"; failed: {', '.join(dict.fromkeys(tests))}"
    lines = (done.stdout + "\n" + done.stderr).strip().splitlines()
    return f"; ended with {done.returncode}: {lines[-1] if lines else 'no output'}"


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    sys.exit(not install())
