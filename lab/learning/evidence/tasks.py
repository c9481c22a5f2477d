"""The tasks of the evidence: which file, which model, and how its pass rate is computed exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.learning import task as sums_task
from lab.learning.evidence import changing, changing_8, sorting
from lab.learning.evidence.padded.sums import padded
from lab.learning.model import LENGTHS, LESSONS, SUMS, Lessons
from offbeat.tasks.data import Example


@dataclass(frozen=True)
class EvidenceTask:
    """A task whose pass rate at temperature 1 is a mean of probabilities."""

    name: str
    file: Path
    lessons: Lessons
    """What its model has learned before RL."""
    tested: Sequence[Example]
    """The prompts over whose right answers the mean is taken."""
    max_tokens: int = 4
    steps: int = 100
    later: Sequence[Example] = ()
    """The prompts that are tested in the second half of the run instead, if the task changes."""


def _file(module: object) -> Path:
    return Path(str(module.__file__))  # type: ignore[attr-defined]


def _padded(digits: int) -> EvidenceTask:
    name = f"padded-{digits}"
    file = Path(__file__).with_name("padded") / f"digits_{digits}.py"
    return EvidenceTask(name, file, LESSONS[name], padded(digits).examples, max_tokens=digits + 1, steps=60)


_CHANGING: Final = (LESSONS["plus-minus"], sums_task.SUMS, 4, 2 * changing.HALF, changing.DIFFERENCES)
TASKS: Final = {
    task.name: task
    for task in (
        EvidenceTask("sums", _file(sums_task), SUMS, sums_task.SUMS),
        EvidenceTask("rare-sums", _file(sums_task), LESSONS["rare-sums"], sums_task.SUMS),
        *map(_padded, LENGTHS),
        EvidenceTask("sorting", _file(sorting), LESSONS["sorting"], sorting.TEST, max_tokens=7),
        EvidenceTask("changing", _file(changing), *_CHANGING),
        EvidenceTask("changing-8", _file(changing_8), *_CHANGING),
    )
}
