"""Measure the foundation: objective, example and installation.

    python -m lab.bench.foundation claims       the papers' claims, with their own numbers: row foundation.1
    python -m lab.bench.foundation properties   invariances and gradients, with hypothesis: row foundation.2
    python -m lab.bench.foundation minimal      examples/minimal.py, v = 1 and v = 10, five seeds each: rows
                                                foundation.5.*
    python -m lab.bench.foundation install      a clean clone in a new virtual environment, light install, then
                                                .ci/run: rows foundation.6.*
    python -m lab.bench.foundation docs         the presets in the docs against the code: row foundation.7

`minimal` and `install` take about 20 minutes each, the others a minute.
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
from lab.fixtures.pytest_runs import run_tests
from offbeat.objective.presets import PRESETS


def claims() -> bool:
    """Row foundation.1."""
    run = run_tests("tests/objective/test_published_numbers.py")
    return record(
        Figure(
            "foundation.1",
            "claims of the papers that hold by their own numbers",
            "all; the bound and its identity over 20,000 random discrete cases in both constants",
            f"{run.passed} of {run.passed + run.failed}",
            "tests",
            run.failed == 0 and run.passed > 0,
            20_000,
            "pairwise consistency, weighted form, bandit, PPO clip, RED-Weight, bound, identity, Bernoulli, std, gates",
        )
    )


def properties() -> bool:
    """Row foundation.2."""
    tests = ("tests/objective/test_invariance.py", "tests/objective/test_presets.py")
    run = run_tests("--hypothesis-show-statistics", *tests)
    blocks = re.split(r"^tests/", run.output, flags=re.MULTILINE)
    examples = [sum(int(n) for n in re.findall(r"(\d+) passing", block)) for block in blocks if "passing" in block]
    headline = [n for n in examples if n >= 100]
    return record(
        Figure(
            "foundation.2",
            "properties of loss and gradient: split, padding, order, missing scores, masks, finiteness, presets",
            "all, at least 200 examples each",
            f"{run.passed} of {run.passed + run.failed}",
            "tests",
            run.failed == 0 and min(headline) >= 200,
            sum(examples),
            f"{len(headline)} properties with at least {min(headline)} examples each; every preset against float64 "
            "autograd on its published formula to 1e-6 relative",
        )
    )


def minimal() -> bool:
    """Rows foundation.5.*."""
    figures = []
    for every in (1, 10):
        starts, ends, seconds = [], [], []
        for seed in range(5):
            command = [sys.executable, "examples/minimal.py", "--sync-every", str(every), "--seed", str(seed)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            last = done.stdout.splitlines()[-1]
            print(f"v={every} seed={seed}: {last}", flush=True)
            found = re.match(r"pass rate ([\d.]+) -> ([\d.]+) in (\d+) s", last)
            assert found, last
            starts.append(float(found[1]))
            ends.append(float(found[2]))
            seconds.append(int(found[3]))
        figures.append(
            Figure(
                f"foundation.5.v{every}",
                f"pass rate of examples/minimal.py --sync-every {every} at its end, lowest of the seeds",
                "from <= 0.5 to >= 0.9 within 180 s on 2 cores",
                min(ends),
                "pass rate",
                max(starts) <= 0.5 and min(ends) >= 0.9 and max(seconds) <= 180,
                5,
                f"starts {min(starts)} to {max(starts)}, ends {min(ends)} to {max(ends)}, "
                f"seconds {min(seconds)} to {max(seconds)}",
            )
        )
    return record(*figures)


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


def docs() -> bool:
    """Row foundation.7."""
    check = subprocess.run([sys.executable, "scripts/build_docs.py", "--check"], cwd=ROOT)
    page = (ROOT / "docs" / "reference" / "presets.md").read_text(encoding="utf-8")
    present = [name for name, preset in PRESETS.items() if f"### {name}\n" in page and preset.equation in page]
    return record(
        Figure(
            "foundation.7",
            "presets in docs/reference/presets.md with equation, source, use and lag, as built from presets.py",
            f"all {len(PRESETS)}, and a stale page fails the tests",
            len(present),
            "presets",
            len(present) == len(PRESETS) and check.returncode == 0,
            len(PRESETS),
        )
    )


COMMANDS = {"claims": claims, "properties": properties, "minimal": minimal, "install": install, "docs": docs}

if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("figure", choices=COMMANDS)
    sys.exit(not COMMANDS[parser.parse_args().figure]())
