"""What is wrong with the tables of a log on a local disk, read without changing them: used by `offbeat fsck`."""

from pathlib import Path
from typing import Final

import lance

from offbeat.experience.lance_table import is_lance_error, is_torn
from offbeat.experience.schema import SCHEMAS

_BATCH: Final = 256


def unreadable_versions(table: Path) -> list[Path]:
    """Return the manifests of the newest versions that cannot be read at all, the newest first."""
    unreadable = []
    for manifest in sorted((table / "_versions").glob("*.manifest")):  # newest first: names count down
        if not is_torn(manifest) and count_rows(table, manifest) is not None:
            break
        unreadable.append(manifest)
    return unreadable


def count_rows(table: Path, manifest: Path | None = None) -> int | None:
    """Return the number of rows in a version, or in the newest readable one; None if there is none."""
    for one in [manifest] if manifest else sorted((table / "_versions").glob("*.manifest")):
        version = 2**64 - 1 - int(one.stem)
        try:
            return int(lance.dataset(str(table), version=version, session=lance.Session()).count_rows())
        except BaseException as error:
            if not is_lance_error(error):
                raise
    return None


def find_unreadable_rows(table: Path) -> str | None:
    """Read every row of the newest version; return the first error, or None."""
    try:
        dataset = lance.dataset(str(table), session=lance.Session())
        if not dataset.schema.equals(SCHEMAS[table.stem]):
            names = set(dataset.schema.names)
            added = [field for field in SCHEMAS[table.stem] if field.name not in names]
            if not all(field.nullable for field in added):
                return "it does not have the columns of an experience log"
        for fragment in dataset.get_fragments():
            for file in fragment.metadata.files:
                found, size = (table / "data" / file.path).stat().st_size, file.file_size_bytes
                if size and found != size:
                    return f"data/{file.path} has {found} bytes instead of {size}"
        dataset.validate()
        rows = sum(batch.num_rows for batch in dataset.to_batches(batch_size=_BATCH))
        if rows != dataset.count_rows():
            return f"{rows} of {dataset.count_rows()} rows can be read"
    except BaseException as error:
        if not is_lance_error(error):
            raise
        return " ".join(str(error).split())[:300]
    return None


def set_aside(manifests: list[Path]) -> None:
    """Rename manifests, so that the version before them is the newest."""
    for manifest in manifests:
        manifest.rename(manifest.with_suffix(".torn"))
    for manifest in manifests[:1]:
        (manifest.parent / "latest_version_hint.json").unlink(missing_ok=True)
