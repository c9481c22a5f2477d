"""What a check of a run says about one part of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Remedy(StrEnum):
    """Who repairs a damage."""

    PERSON = "`offbeat fsck` cannot repair it"
    FSCK = "`offbeat fsck --repair` repairs it"
    RESUME = "the next `offbeat resume` repairs it"


@dataclass(frozen=True)
class PartFinding:
    """One part of a run, whole or damaged.

    >>> print(PartFinding("config.json", "every setting is valid"))
    whole    config.json: every setting is valid
    >>> print(PartFinding("tokenizer", "it is missing", Remedy.RESUME))
    damaged  tokenizer: it is missing; the next `offbeat resume` repairs it
    """

    part: str
    """The file or directory, relative to the run."""
    says: str
    """What was found. If only a person can repair it, also what to do."""
    remedy: Remedy | None = None
    """None if the part is whole."""
    repair: Callable[[], str] | None = None
    """Of `Remedy.FSCK`: repairs the damage and returns what it did."""

    def __str__(self) -> str:
        if self.remedy is None:
            return f"whole    {self.part}: {self.says}"
        return f"damaged  {self.part}: {self.says}; {self.remedy}"
