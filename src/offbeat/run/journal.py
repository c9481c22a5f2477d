"""`events.jsonl`, the record of a run that everything else is derived from, and seconds by phase of the loop.

Each line is one event: its time, step, kind and fields. One process writes whole lines, so you can read the file while
the run works. If a crash cuts a line short, `read` skips it, and the next writer starts a new line after it.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, Self

from offbeat.events import EventKind
from offbeat.secrecy import hide_secrets
from offbeat.types import Group, Json, Score

CRC: Final = b', "crc": '
"""What follows in a line is the CRC-32 of what is before it. Lines of earlier versions have none."""


class Phase(StrEnum):
    """What the loop is doing; exactly one of these at any time."""

    CHECKING = "checking memory"
    """The first step waits until the largest micro-batch was computed once, which begins while workers start."""
    GROUPS = "waiting for groups"
    """Generation and scoring, as far as the trainer waits for them."""
    LOADING = "waiting for workers to load"
    """After a publish no group is generated until a worker has loaded the version and passed its probe."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"
    """Workers give back their prompts and close their engines."""
    ITSELF = "the loop itself"


@dataclass
class Stopwatch:
    """Seconds by phase. Their sum is the time since the stopwatch was made.

    >>> times = iter([0.0, 1.0, 4.0, 4.5])
    >>> watch = Stopwatch(lambda: next(times))
    >>> with watch.phase(Phase.TRAINING):
    ...     pass
    >>> watch.seconds()
    {<Phase.ITSELF: 'the loop itself'>: 1.5, <Phase.TRAINING: 'training'>: 3.0}
    """

    clock: Callable[[], float] = time.monotonic
    _spent: dict[Phase, float] = field(default_factory=dict)
    _phase: Phase = Phase.ITSELF
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the block's time as `phase`."""
        before = self._switch_to(phase)
        try:
            yield
        finally:
            self._switch_to(before)

    def move(self, seconds: float, before: Phase, after: Phase) -> None:
        """Count time of one phase as another, if it turns out later what it was spent on."""
        moved = min(seconds, self._spent.get(before, 0.0))
        self._spent[before] = self._spent.get(before, 0.0) - moved
        self._spent[after] = self._spent.get(after, 0.0) + moved

    @property
    def current(self) -> Phase:
        return self._phase

    def seconds(self) -> dict[Phase, float]:
        self._switch_to(self._phase)
        return dict(self._spent)

    def to_json(self) -> dict[str, Json]:
        return {str(phase): spent for phase, spent in self.seconds().items()}

    def _switch_to(self, phase: Phase) -> Phase:
        """Change the phase and return the one before."""
        now, before = self.clock(), self._phase
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return before


def rewards_by_version(groups: Iterable[Group]) -> dict[str, Json]:
    """Map each oldest version of groups to their mean reward and number: the field `rewards` of a step."""
    found: dict[int, list[float]] = {}
    for group in groups:
        rewards = [one.score.reward for one in group.completions if isinstance(one.score, Score)]
        if (version := group.oldest_version) is not None and rewards:
            found.setdefault(version, []).append(sum(rewards) / len(rewards))
    return {str(version): [sum(means) / len(means), len(means)] for version, means in sorted(found.items())}


Listener = Callable[[Mapping[str, Json]], None]


class Journal(Protocol):
    """Where events go."""

    def write(self, kind: EventKind, step: int, **fields: Json) -> None: ...


class FileJournal:
    """The `events.jsonl` of a run directory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with FileJournal(Path(place) / "events.jsonl", clock=lambda: 17.0) as journal:
    ...         journal.write(EventKind.PUBLISHED, 4, version=4)
    ...     list(read(Path(place) / "events.jsonl"))
    [{'at': 17.0, 'step': 4, 'kind': 'published', 'version': 4}]
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, listener: Listener | None = None) -> None:
        self._clock, self._listener = clock, listener
        self._file = path.open("a+b", buffering=0)
        if (size := self._file.tell()) and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.write(b"\n")

    def write(self, kind: EventKind, step: int, **fields: Json) -> None:
        """Append one event by one system call, so that lines never mix. NaN and infinity become null; secrets `***`."""
        shown = {name: hide_secrets(one) if isinstance(one, str) else one for name, one in fields.items()}
        line = {"at": self._clock(), "step": step, "kind": str(kind), **shown}
        if self._listener is not None:
            self._listener(line)
        text = json.dumps(_finite(line), ensure_ascii=False, allow_nan=False).encode()[:-1]
        self._file.write(b"%b%b%d}\n" % (text, CRC, zlib.crc32(text)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def record_failure(journal: Journal, step: Callable[[], int]) -> Iterator[None]:
    """Write a `failed` event if the block raises, and let the error pass.

    >>> from contextlib import suppress
    >>> journal = MemoryJournal()
    >>> with suppress(ValueError), record_failure(journal, lambda: 7):
    ...     raise ValueError("no groups")
    >>> journal.events
    [{'step': 7, 'kind': 'failed', 'error': 'ValueError', 'why': 'no groups'}]
    """
    try:
        yield
    except Exception as error:
        journal.write(EventKind.FAILED, step(), error=type(error).__name__, why=str(error)[:2000])
        raise


@dataclass
class MemoryJournal:
    """A journal in memory, for tests."""

    events: list[dict[str, Json]] = field(default_factory=list)

    def write(self, kind: EventKind, step: int, **fields: Json) -> None:
        self.events.append({"step": step, "kind": str(kind), **fields})

    def of(self, kind: str) -> list[dict[str, Json]]:
        return [event for event in self.events if event["kind"] == kind]


def read(path: Path) -> Iterator[dict[str, Json]]:
    """Yield the events of a journal, also while a run writes it. Lines that are no events are skipped."""
    with path.open("rb") as lines:
        for line in lines:
            if (event := read_line(line)) is not None:
                yield event


def read_line(line: bytes) -> dict[str, Json] | None:
    """Return the event in a line; None if it is none, or if it is not as it was written."""
    text, mark, crc = line.rstrip().rpartition(CRC)
    if mark and crc != b"%d}" % zlib.crc32(text):
        return None
    try:
        event = json.loads(text + b"}" if mark else line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _finite(value: Json) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
