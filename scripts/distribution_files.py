"""Check that wheel and sdist hold every file of the package, recipes and templates included, and nothing foreign."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE_SOURCE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}


def package_files() -> set[str]:
    """Return the files of src/, relative to it, without what Python and tools leave there."""
    source = ROOT / "src"
    files = (file for file in source.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(source).as_posix() for file in files if ".egg-info" not in str(file)}


def find_faults(dist: Path) -> list[str]:
    """Return what is missing from the wheel and the sdist in `dist`, or foreign to the wheel."""
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    expected = package_files()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    faults = [f"{wheel.name} lacks {name}" for name in sorted(expected - held)]
    faults += [f"{wheel.name} holds {name}, which is not in src/" for name in sorted(held - expected)]
    wanted = {f"src/{name}" for name in expected} | BESIDE_SOURCE
    return faults + [f"{sdist.name} lacks {name}" for name in sorted(wanted - names)]


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    if faults := find_faults(dist):
        sys.exit("\n".join(faults))
    recipes = sum(name.endswith(".toml") for name in package_files())
    for file in sorted(dist.iterdir()):
        print(f"{file.name}: {file.stat().st_size} bytes")
    print(f"{len(package_files())} files of the package, {recipes} recipes: all in wheel and sdist")
