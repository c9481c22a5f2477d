"""Measure what a user of the Python API meets first: import time, the examples of the API page, the README's script.

    python -m lab.house.public_api          a few minutes; writes rows house.3.*

The import is timed as a whole process, with `python -X importtime` beside it.
"""

import re
import subprocess
import sys
import time
from statistics import median

from lab.figures import ROOT, Figure, command_parser, record

IMPORTS = 11


def import_time() -> Figure:
    """Time `import offbeat` in new processes."""
    code = "import sys, offbeat; sys.exit('torch' in sys.modules)"
    seconds, inside = [], []
    for _ in range(IMPORTS):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, "import offbeat loads torch"
        [line] = [line for line in done.stderr.splitlines() if line.endswith("| offbeat")]
        inside.append(int(line.split("|")[1]) / 1e6)
    return Figure(
        "house.3.import", "python -X importtime -c 'import offbeat', whole process, median", "< 0.3 s, without torch",
        round(median(seconds), 3), "s", median(seconds) < 0.3, IMPORTS,
        f"{min(seconds):.3f} to {max(seconds):.3f} s; the import itself {median(inside):.4f} s",
    )  # fmt: skip


def tests(name: str, what: str, *selection: str) -> Figure:
    """Run tests and count them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "engine or not engine", *selection]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    passed, failed = (re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "failed|error"))
    right, wrong = int(passed[1]) if passed else 0, int(failed[1]) if failed else 0
    holds = done.returncode == 0 and right > 0
    return Figure(name, what, "all", f"{right} of {right + wrong}", "tests", holds, right + wrong)


def main() -> bool:
    """Measure all three."""
    page = "API page: examples that run, every public name on it, light import"
    script = "README script of at most 12 lines: trains the tiny model, learns, plots its curve from Run"
    return record(
        import_time(),
        tests("house.3.page", page, "tests/site/test_docs.py", "tests/test_api.py", "-k", "api.md or public or heavy"),
        tests("house.3.script", script, "tests/test_api.py", "-k", "readme"),
    )


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    sys.exit(not main())
