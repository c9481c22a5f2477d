"""Print what a wheel requires on this machine, less the packages named after --without."""

import argparse
import email
import re
import zipfile

# Not pip's copy of it: after `import pip`, neither setuptools nor vLLM can be imported.
from packaging.requirements import Requirement


def requirements(wheel: str, without: set[str]) -> list[str]:
    """Requirement lines of `wheel` whose markers hold here, extras excluded."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    kept = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if re.sub(r"[-_.]+", "-", requirement.name).lower() in without:
            continue
        requirement.marker = None
        kept.append(str(requirement))
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("--without", nargs="*", default=[])
    arguments = parser.parse_args()
    print("\n".join(requirements(arguments.wheel, set(arguments.without))))
