"""Everything a report knows about one run, read once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.config import Config
from offbeat.experience.ledger import ConservationError, Fate
from offbeat.report.groups import Groups
from offbeat.report.history import History, State, read_history, state_of
from offbeat.report.improvement import Improvement, earned_by_version, improvements
from offbeat.run.directory import RunDirectory
from offbeat.types import Json


@dataclass(frozen=True)
class Record:
    """One run."""

    name: str
    path: Path
    config: Config
    environment: Mapping[str, Json]
    history: History
    state: State
    groups: Groups | None
    """None where there is no experience log yet."""

    @classmethod
    def of(cls, path: Path) -> "Record":
        """Read a run directory, also of a run that goes on. Raises `RunError` where there is none."""
        directory = RunDirectory(path)
        config = directory.config()
        history = read_history(directory)
        return cls(
            name=path.resolve().name,
            path=path,
            config=config,
            environment=_environment(path / "environment.json"),
            history=history,
            state=state_of(directory, history, config.steps),
            groups=Groups.of(directory, config),
        )

    @property
    def shares_log(self) -> bool:
        """Whether its experience log holds groups of others, whose versions are not its own."""
        return bool(self.config.run.experience)

    @property
    def generates(self) -> bool:
        """Whether it has workers of its own."""
        return self.config.run.mode != "offline"

    def improvements(self) -> list[Improvement]:
        """Predicted and realised at each publish that can be judged."""
        if self.groups is None or self.shares_log or self.cannot_predict:
            return []
        masked = self.config.objective.resolve().zero_variance_mask
        return improvements(self.history, earned_by_version(self.groups.columns), contrast_only=masked)

    @property
    def cannot_predict(self) -> bool:
        """One update on samples of the very same policy: the prediction is 0 by construction."""
        return self.config.updates_per_batch == 1 and self.config.largest_lag == 0

    @property
    def imbalance(self) -> str:
        """What is wrong with the books; empty where they balance."""
        try:
            if self.groups is not None:
                self.groups.ledger.check()
        except ConservationError as error:
            return str(error)
        return ""

    def fates(self) -> dict[str, int]:
        """Groups by fate, the trained first; what does not occur is left out."""
        if self.groups is None:
            return {}
        order = [Fate.TRAINED, Fate.WAITING, Fate.IN_FLIGHT, *Fate]
        return {fate.value: count for fate in dict.fromkeys(order) if (count := self.groups.ledger.counts[fate])}


def _environment(file: Path) -> Mapping[str, Json]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
