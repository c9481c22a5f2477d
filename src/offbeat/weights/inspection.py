"""What is wrong with a weight log, read without changing it: used before a run resumes, and by `offbeat fsck`."""

import hashlib
from collections.abc import Mapping
from typing import Final

from offbeat.errors import DamagedFile, WeightLogError
from offbeat.storage.store import Store
from offbeat.weights.manifest import CALIBRATION, FOLDER, File, VersionManifest, manifest_name, version_of

_BLOCK: Final = 1 << 22


def listed_versions(store: Store) -> list[int]:
    """Return the versions that have a manifest, readable or not, in order."""
    return sorted(v for name in store.list_names(FOLDER) if (v := version_of(name)) is not None)


def read_manifests(store: Store) -> tuple[dict[int, VersionManifest], dict[int, str]]:
    """Return the manifests of a log by version, in order, and what is wrong with those that cannot be used.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from offbeat.storage.store import LocalStore
    >>> with tempfile.TemporaryDirectory() as place:
    ...     read_manifests(LocalStore(Path(place)))
    ({}, {})
    """
    whole: dict[int, VersionManifest] = {}
    damaged: dict[int, str] = {}
    for version in listed_versions(store):
        try:
            whole[version] = _read(store, manifest_name(version), version)
        except FileNotFoundError:
            continue  # removed since it was listed
        except (OSError, DamagedFile) as error:
            damaged[version] = str(error)
    return whole, damaged


def read_calibration(store: Store) -> VersionManifest | None:
    """Return the copy of version 0's manifest that is kept for its probe; None if it is missing or damaged."""
    try:
        found = _read(store, CALIBRATION, 0)
    except (OSError, DamagedFile):
        return None
    return found if found.probe is not None else None


def find_problem(store: Store, manifests: Mapping[int, VersionManifest], version: int) -> str | None:
    """Read every byte that a reader of this version needs, back to the anchor; return what is wrong, or None."""
    if version not in manifests:
        return f"version {version} is not in {store.uri}"
    step = manifests[version]
    while True:
        for file in step.files:
            if problem := _file_problem(store, file):
                return f"version {step.version}: {problem}"
        if step.anchor is not None or step.base is None:
            return None
        base = manifests.get(step.base.version)
        if base is None:
            return f"version {step.version} needs version {step.base.version}, which is missing or damaged"
        if base.sha256 != step.base.manifest:
            return f"version {step.version} was made for another version {base.version}: files of two logs are mixed"
        step = base


def unusable(store: Store, error: OSError) -> WeightLogError:
    """Return the error for a log whose files cannot be listed or removed."""
    return WeightLogError(
        f"the weight log {store.uri} cannot be used: {error}. Move the directory away, then resume the run: it "
        "publishes its policy again from the checkpoint"
    )


def _read(store: Store, name: str, version: int) -> VersionManifest:
    manifest = VersionManifest.parse(store.read(name), name)
    if manifest.version != version:
        raise DamagedFile(f"the manifest {name} describes version {manifest.version}: the file was renamed or replaced")
    return manifest


def _file_problem(store: Store, file: File) -> str | None:
    sha256, size = hashlib.sha256(), 0
    try:
        with store.open(file.name) as stream:
            while block := stream.read(_BLOCK):
                sha256.update(block)
                size += len(block)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror or error})"
    if size != file.bytes:
        return f"{file.name} has {size} bytes, its manifest says {file.bytes}"
    if sha256.hexdigest() != file.sha256:
        return f"{file.name} differs from the sha256 in its manifest"
    return None
