"""Break the files of a weight log as a disk, a network or a person may break them: a reader must refuse every one."""

import random
import tempfile
from collections import Counter
from pathlib import Path

from lab.figures import Figure
from offbeat.errors import WeightLogError
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.weights import is_state, make_state

ELEMENTS = 2_000
LAST = 3
"""Version 0 is an anchor, 1 a patch, 2 both, 3 a patch."""
WAYS = ("flip a bit", "alter a byte", "cut", "lengthen", "blank a stretch", "drop a byte", "swap with another file")


def mutant(content: bytes, how: str, others: list[bytes], rng: random.Random) -> bytes:
    """Return the content broken, never equal to the original."""
    at = rng.randrange(len(content))
    if how == "flip a bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if how == "alter a byte":
        return content[:at] + bytes([(content[at] + rng.randrange(1, 256)) % 256]) + content[at + 1 :]
    if how == "cut":
        return content[:at]
    if how == "lengthen":
        return content + rng.randbytes(rng.randint(1, 64))
    if how == "blank a stretch":
        end = min(len(content), at + rng.randint(1, 512))
        blank = content[:at] + bytes(end - at) + content[end:]
        return blank if blank != content else mutant(content, "flip a bit", others, rng)
    if how == "drop a byte":
        return content[:at] + content[at + 1 :] if len(content) > 1 else b""
    return rng.choice([other for other in others if other != content])


def read_all(place: Path, version: int, *, following: bool) -> bool:
    """Fetch a version from its anchor or after the version before. Return False if the reader refuses it."""
    with Subscription.open(place, name="reader") as reader:
        try:
            if following and version:
                reader.fetch(version - 1)
            state = dict(reader.fetch(version))
        except WeightLogError:
            return False
    if not is_state(state, version, ELEMENTS):
        raise SystemExit(f"the reader accepted a state of version {version} that differs from the published one")
    return True


def files_read(place: Path, version: int, following: bool) -> list[Path]:
    """Return the files that such a fetch opens. Damage to other files cannot be detected and does no harm."""
    patches = {v: next((place / "data").glob(f"{v:010}-*.patch")) for v in range(1, LAST + 1)}
    anchors = {v: next((place / "data").glob(f"{v:010}-*.safetensors")) for v in (0, 2)}
    manifest = place / "versions" / f"{version:010}.json"
    if following and version:
        return [manifest, patches[version]]
    start = version - version % 2
    return [manifest, anchors[start], *([patches[version]] if version != start else [])]


def mutants(count: int, seed: int) -> list[Figure]:
    """Row weights-rollout.1.mutants: break one file at a time and fetch."""
    rng = random.Random(seed)
    accepted: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="offbeat-mutants-") as temporary:
        place = Path(temporary)
        with WeightLog.open(place, anchor_every=2) as log:
            for version in range(LAST + 1):
                log.publish(version, make_state(version, ELEMENTS).items())
        others = [file.read_bytes() for folder in ("data", "versions") for file in (place / folder).iterdir()]
        for number in range(count):
            version, following, how = rng.randint(0, LAST), rng.random() < 0.5, WAYS[number % len(WAYS)]
            file = rng.choice(files_read(place, version, following))
            whole = file.read_bytes()
            file.write_bytes(mutant(whole, how, others, rng))
            kind = {".json": "manifest", ".patch": "patch", ".safetensors": "anchor"}[file.suffix]
            tried[kind] += 1
            accepted[f"{kind}: {how}"] += read_all(place, version, following=following)
            file.write_bytes(whole)
        sound = all(read_all(place, v, following=f) for v in range(LAST + 1) for f in (True, False))
    wrong = +accepted
    for line, times in wrong.items():
        print("  accepted", line, times)
    return [
        Figure(
            "weights-rollout.1.mutants",
            "mutated manifests, patches and anchors that a reader accepted",
            "0 of 20,000",
            wrong.total(),
            "files",
            not wrong and sound,
            count,
            f"{', '.join(f'{kind} {n:,}' for kind, n in tried.items())}; ways: {', '.join(WAYS)}. Half of the fetches "
            f"start from an anchor, half apply a patch to the current state; every refusal is a typed error; the "
            f"intact files were accepted afterwards",
        )
    ]
