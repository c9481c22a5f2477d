"""Install as README.md says, from the public package index alone, and try what was installed.

    python -m lab.bench.install resolve            README's commands on each Python, with the public index and with the
                                                   settings of this machine: rows door.1.resolve-*; 5 to 20 minutes
    python -m lab.bench.install hosts              `.[log]` beside TRL, verl and Trinity-RFT at their newest releases:
                                                   rows inside.1.*; minutes
    python -m lab.bench.install torch PLACE        offbeat without extras beside the oldest and the newest torch, in
                                                   environments in PLACE, and the tests of the mathematics with each:
                                                   rows inside.1.torch-*; 10 minutes, 5 GB
    python -m lab.bench.install wheel              wheel and sdist of a clean clone, each in an empty environment: row
                                                   door.1.wheel; 2 minutes
    python -m lab.bench.install gpu-stack PLACE    README's command for GPUs, really installed into PLACE: row
                                                   door.1.gpu-stack; then what the tests need; 5 to 40 minutes, 10 GB
    python -m lab.bench.install look-gpu-stack PLACE   doctor and check with it: rows door.1.gpu-stack-doctor and
                                                   -check; a minute
    python -m lab.bench.install try-gpu-stack PLACE   quickstart and quick tests with it: rows
                                                   door.1.gpu-stack-quickstart and -tests; 15 minutes

`resolve` needs the Pythons (pyenv's are found). Torch's CUDA build computes on CPUs too, so the last two prove what
needs no device. Remove PLACE afterwards.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

from lab.figures import ROOT, Figure, command_parser, machine, record
from scripts.resolve import HOSTS, Resolved, beside, make_pip, public_index, readme_commands, resolve

PYTHONS: Final = ("3.11", "3.13")
"""The first and the last that are supported."""
TORCH: Final = ("2.7", "2.13")
"""The ends of the range that the mathematics takes."""
LAB_TEST: Final = "--ignore=tests/objective/test_measured.py"
"""It reads rows of the lab, which needs more than torch."""
ANY_USE: Final = ".[train,vllm,lora,ray,math,report,docs,tensorboard,wandb,trackio,mlflow,dev]"
"""What the tests need, installed after README's command was measured."""
RANDOM_MODEL: Final = (
    "from pathlib import Path; import offbeat.preflight.doctor as d; d._save_random_model(Path('model'))"
)


def commands() -> tuple[str, str]:
    """Return README's install commands for a CPU and for a GPU."""
    found = readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    [gpu] = [line for line in found if "vllm" in line]
    [cpu] = [line for line in found if line != gpu]
    return cpu, gpu


def resolve_all() -> bool:
    """Rows door.1.resolve-cpu, door.1.resolve-gpu."""
    cpu, gpu = commands()
    public, here = public_index(os.environ), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        places = {python: make_pip(Path(folder) / python, _find_python(python), public) for python in PYTHONS}

        def ask(line: str, python: str, environment: Mapping[str, str]) -> Resolved:
            return resolve(places[python], shlex.split(line)[2:], environment)

        asked = [(cpu, python, public) for python in PYTHONS] + [(cpu, PYTHONS[0], here)]
        asked += [(gpu, python, public) for python in PYTHONS]
        found = list(pool.map(lambda one: ask(*one), asked))
    print(*found, sep="\n")
    names = [*(f"Python {python}" for python in PYTHONS), f"Python {PYTHONS[0]} with this machine's local wheels"]
    return record(
        _resolved("door.1.resolve-cpu", cpu, dict(zip(names, found[: len(PYTHONS) + 1], strict=True))),
        _resolved("door.1.resolve-gpu", gpu, dict(zip(names, found[len(PYTHONS) + 1 :], strict=False))),
    )


def hosts() -> bool:
    """Rows inside.1.trl, inside.1.verl, inside.1.trinity: what `.[log]` adds beside each trainer."""
    public = public_index(os.environ)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        pip = make_pip(Path(folder), _find_python(PYTHONS[0]), public)
        asked = [line for host in HOSTS for line in (f"pip install {host}", beside(host))]
        found = list(pool.map(lambda line: resolve(pip, shlex.split(line)[2:], public), asked))
    return record(*(_added(host, *found[2 * i : 2 * i + 2]) for i, host in enumerate(HOSTS)))


def _added(host: str, alone: Resolved, beside_it: Resolved) -> Figure:
    added = sorted(beside_it.versions.keys() - alone.versions.keys())
    changed = [name for name, version in alone.versions.items() if beside_it.versions.get(name) != version]
    size = sum(_size(beside_it.files[name]) for name in added)
    held = not beside_it.error and not changed and "torch" not in added
    told = f"{host} {beside_it.versions.get(host, '?')}, {len(alone.versions)} packages; added: {', '.join(added)}"
    return Figure(
        f"inside.1.{host.partition('-')[0]}",
        f"`{beside(host)}` resolves from the public package index, and changes no package of {host}",
        "0 changed, no torch added",
        f"{len(changed)} changed, {len(added)} added, {size / 1e6:.0f} MB",
        "packages",
        held,
        1,
        f"pip's own resolver, no configuration file, dry run; {told}; {beside_it.error[-300:]}",
    )


def torch_ends(place: Path) -> bool:
    """Rows inside.1.torch-2.7, inside.1.torch-2.13."""
    return record(*(_with_torch(place / version, version) for version in TORCH))


def _with_torch(place: Path, version: str) -> Figure:
    if not (place / "bin" / "pytest").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        tests = ["pytest", "pytest-xdist", "hypothesis"]
        subprocess.run([place / "bin" / "pip", "install", "-q", f"torch=={version}.*", str(ROOT), *tests], check=True)
    with tempfile.TemporaryDirectory() as clone:
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        # The tests are those of the clone, the code is what is installed: no transformers, no pyarrow, no scipy.
        options = ["-q", "-p", "no:cacheprovider", "-o", "testpaths=", "-W", "default"]
        command = [str(place / "bin" / "python"), "-P", "-m", "pytest", *options, "tests/objective", LAB_TEST]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    told = subprocess.run([place / "bin" / "pip", "list"], capture_output=True, text=True).stdout
    found = dict(line.split()[:2] for line in told.splitlines() if len(line.split()) >= 2)
    passed, failed = (
        sum(map(int, re.findall(rf"(\d+) {word}", done.stdout.strip().splitlines()[-1])))
        for word in ("passed", "failed")
    )
    print(done.stdout[-2000:])
    absent = [name for name in ("transformers", "pyarrow", "pylance", "datasets") if name not in found]
    return Figure(
        f"inside.1.torch-{version}",
        "tests of the mathematics with offbeat without extras, and torch",
        "0 failed",
        f"{passed} passed, {failed} failed",
        "tests",
        done.returncode == 0 and passed > 100,
        passed + failed,
        f"torch {found.get('torch')}, numpy {found.get('numpy')}; not installed: {', '.join(absent)}",
    )


def _size(url: str) -> int:
    """Return the bytes of a file of the index, without downloading it."""
    with urlopen(Request(url, method="HEAD")) as answer:
        return int(answer.headers["Content-Length"])


def _resolved(row: str, line: str, found: Mapping[str, Resolved]) -> Figure:
    told = [f"{name}: {str(one).partition(': ')[2]}" for name, one in found.items()]
    return Figure(
        row,
        f"README's `{line}` resolves from the public package index alone",
        f"{len(found)} of {len(found)}",
        sum(not one.error for one in found.values()),
        f"of {len(found)}",
        not any(one.error for one in found.values()),
        len(found),
        f"pip's own resolver, no configuration file, no local wheels except where named; {'; '.join(told)}",
    )


def _find_python(version: str) -> str:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(one / "bin" / "python3") for one in sorted(pyenv.glob(f"{version}.*"))), f"python{version}")


def wheel() -> bool:
    """Row door.1.wheel."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
        done = subprocess.run([Path(place) / "scripts" / "release", "--build"], capture_output=True, text=True)
    print(output := done.stdout + done.stderr)
    installed = re.findall(r"release: dist/(\S+) installs without extras", output)
    checked = len(re.findall(r"Checking .*PASSED", output))
    sizes = re.findall(r"offbeat-\S+: \d+ bytes", output)
    return record(
        Figure(
            "door.1.wheel",
            "wheel and sdist, built from a clean clone, pass twine check and install into an empty environment",
            "both",
            len(installed),
            "of 2",
            done.returncode == 0 and len(installed) == checked == 2,
            1,
            f"scripts/release --build, also in CI; {', '.join(sizes)}; `offbeat init` and `offbeat --version` run; "
            f"{time.monotonic() - started:.0f} s; {machine()}",
        )
    )


def gpu_stack(place: Path) -> bool:
    """Row door.1.gpu-stack."""
    _, line = commands()
    public, started, new = public_index(os.environ), time.monotonic(), not place.exists()
    if new:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    done = subprocess.run([place / "bin" / "pip", *shlex.split(line)[1:]], cwd=ROOT, env=public)
    seconds = time.monotonic() - started
    listed = subprocess.run([place / "bin" / "pip", "list", "--format", "json"], capture_output=True, text=True)
    versions = {one["name"]: one["version"] for one in json.loads(listed.stdout)}
    used = int(subprocess.run(["du", "-sk", place], capture_output=True, text=True).stdout.split()[0]) / 1e6
    shown = ", ".join(f"{name} {versions.get(name, 'missing')}" for name in ("torch", "triton", "vllm", "transformers"))
    taken = f"{seconds / 60:.0f} minutes" if new else "an environment in which the same command ran before"
    held = record(
        Figure(
            "door.1.gpu-stack",
            f"README's `{line}`, really installed into a new environment, on a machine without a GPU",
            "installs",
            len(versions) if done.returncode == 0 else "failed",
            "packages",
            done.returncode == 0 and "vllm" in versions,
            1,
            f"{used:.1f} GB in {taken}, with the pip {versions.get('pip')} of `python -m venv`; {shown}; {machine()}",
        )
    )
    more = ["install", "--quiet", "-c", "constraints-gpu.txt", ANY_USE]
    subprocess.run([place / "bin" / "pip", *more], cwd=ROOT, env=public, check=True)
    return held


def look_gpu_stack(place: Path) -> bool:
    """Rows door.1.gpu-stack-doctor and -check, for the environment that `gpu_stack` made."""
    with tempfile.TemporaryDirectory() as folder:
        doctor = _run(place, folder, "offbeat", "doctor")
        _run(place, folder, "python", "-c", RANDOM_MODEL)
        _run(place, folder, "offbeat", "init", "smollm2-arithmetic", "--out", "run.toml")
        settings = ["engine.kind=vllm", "model.path=model", "task.options.chat=false"]
        check = _run(place, folder, "offbeat", "check", "run.toml", *(f"--set={one}" for one in settings))
    engine = re.search(r"^.*engine hf: .*$", doctor.stdout, re.MULTILINE)
    extra = re.search(r"^.*extra vllm: .*$", doctor.stdout, re.MULTILINE)
    found = "; ".join(line[0].strip() for line in (extra, engine) if line)
    return record(
        Figure("door.1.gpu-stack-doctor", "`offbeat doctor` with the CUDA builds, without a GPU", "exit code 0",
               doctor.returncode, "", doctor.returncode == 0, 1, found or doctor.stdout[-300:]),
        Figure("door.1.gpu-stack-check", "`offbeat check` of a recipe whose engine is vLLM, with the CUDA builds",
               "exit code 0", check.returncode, "", check.returncode == 0, 1,
               f"smollm2-arithmetic with {', '.join(settings)}, a random model"),
    )  # fmt: skip


def try_gpu_stack(place: Path) -> bool:
    """Rows door.1.gpu-stack-quickstart and -tests, for the environment that `gpu_stack` made."""
    with tempfile.TemporaryDirectory() as folder:
        quickstart = _run(place, folder, "offbeat", "quickstart", "--out", "one")
    tests = _run(place, ROOT, "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
    rates = re.search(r"pass rate ([\d.]+) -> ([\d.]+)", quickstart.stdout)
    counted = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", tests.stdout)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", tests.stdout, re.MULTILINE)
    bad = counted.get("failed", 0) + counted.get("error", 0)
    return record(
        Figure("door.1.gpu-stack-quickstart", "`offbeat quickstart` with the CUDA builds: pass rate before and after",
               ">= 0.9 after", f"{rates[1]} -> {rates[2]}" if rates else "failed", "",
               quickstart.returncode == 0 and rates is not None and float(rates[2]) >= 0.9, 1, machine()),
        Figure("door.1.gpu-stack-tests", "quick tests that fail with the CUDA builds of torch and vLLM, without a GPU",
               "0", bad, f"of {counted.get('passed', 0) + bad}", bad == 0 and "passed" in counted, 1,
               f"{counted.get('skipped', 0)} skipped; {', '.join(failures) or 'none failed'}; without the peers of "
               f"lab/requirements.txt; {machine()}"),
    )  # fmt: skip


def _run(place: Path, cwd: str | Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the environment in `place`, with the sources of this checkout, and print how it ends."""
    own = {"PYTHONPATH": str(ROOT / "src"), "OFFBEAT_VENV": str(place)}
    environment = {**os.environ, **own, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    print(f"$ {' '.join(command)}  [{done.returncode}, {time.monotonic() - started:.0f} s]", done.stdout[-3000:])
    print(done.stderr[-2000:])
    return done


PLACED: Final = {
    "torch": torch_ends,
    "gpu-stack": gpu_stack,
    "look-gpu-stack": look_gpu_stack,
    "try-gpu-stack": try_gpu_stack,
}
"""What needs the directory of an environment."""


def main() -> bool:
    """Measure what the command line asks for."""
    parser = command_parser(__doc__)
    parser.add_argument("figure", choices=["resolve", "hosts", "wheel", *PLACED])
    parser.add_argument(
        "place", nargs="?", type=Path, help="for those about torch and the GPU stack: the new environment"
    )
    args = parser.parse_args()
    if args.figure not in PLACED:
        return {"resolve": resolve_all, "hosts": hosts, "wheel": wheel}[args.figure]()
    if args.place is None:
        parser.error(f"{args.figure} needs the directory of the new environment")
    return PLACED[args.figure](args.place.absolute())


if __name__ == "__main__":
    sys.exit(not main())
