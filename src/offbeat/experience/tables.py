"""The four tables of a log under one URI, and the snapshot that says how far each had come."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from offbeat.experience.schema import EVENTS, GROUPS, QUARANTINE, SCORES
from offbeat.experience.table import Table


@dataclass(frozen=True)
class Snapshot:
    """The log as it stood at one moment: how many rows each table had. Later rows and scores are not in it.

    It stays readable for ever: rows keep their places, so nothing has to be kept alive for it.

    >>> Snapshot.from_json(Snapshot(groups=3, scores=1, events=7, quarantine=0).to_json()).groups
    3
    """

    groups: int = 0
    scores: int = 0
    events: int = 0
    quarantine: int = 0

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, int]) -> "Snapshot":
        """The inverse of `to_json`."""
        return cls(**state)


@dataclass(frozen=True)
class Tables:
    """Groups, late scores, events and quarantine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     Tables.open(place).snapshot()
    Snapshot(groups=0, scores=0, events=0, quarantine=0)
    """

    groups: Table
    scores: Table
    events: Table
    quarantine: Table

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, str] | None = None, *, create: bool = True) -> "Tables":
        """Open the tables under a URI; what is missing is created, or else it is an error."""
        root = uri.rstrip("/")
        return cls(
            *(
                Table(f"{root}/{name}.lance", schema, storage_options, create=create)
                for name, schema in (
                    ("groups", GROUPS),
                    ("scores", SCORES),
                    ("events", EVENTS),
                    ("quarantine", QUARANTINE),
                )
            )
        )

    def snapshot(self) -> Snapshot:
        """The log as it stands now.

        Groups are counted last: what a score or an event of the snapshot speaks of is in the snapshot too.
        """
        quarantine, events, scores = self.quarantine.rows(), self.events.rows(), self.scores.rows()
        return Snapshot(groups=self.groups.rows(), scores=scores, events=events, quarantine=quarantine)
