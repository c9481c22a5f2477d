"""Everything a report uses from one run directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.config import Config
from offbeat.errors import ConservationError
from offbeat.experience.ledger import Fate
from offbeat.reports.groups import RunGroups
from offbeat.reports.history import RunHistory, RunState, read_history, state_of
from offbeat.reports.improvement import Improvement, improvements, rewards_by_version
from offbeat.run.directory import RunDirectory
from offbeat.types import Json


@dataclass(frozen=True)
class RunRecord:
    """One run directory, read once."""

    name: str
    path: Path
    config: Config
    environment: Mapping[str, Json]
    history: RunHistory
    state: RunState
    groups: RunGroups | None
    """None if there is no experience log yet."""

    @classmethod
    def load(cls, path: Path, name: str = "") -> "RunRecord":
        """Read a run directory; works while the run is running. Raises `RunError` if `path` is not one."""
        directory = RunDirectory(path)
        config = directory.config()
        history = read_history(directory)
        if config.run.mode == "offline":
            history = _without_lags(history)
        return cls(
            name=name or path.resolve().name,
            path=path,
            config=config,
            environment=directory.environment,
            history=history,
            state=state_of(directory, history, config.steps),
            groups=RunGroups.open(directory, config),
        )

    @property
    def steps(self) -> int:
        """The last step that the run was asked for."""
        return self.history.planned or max(self.config.steps, self.history.last_step)

    @property
    def title(self) -> str:
        """The model, the task and the objective of the run."""
        config = self.config
        asked = config.task.name if config.asks else "stored groups"
        model, task = (one.rstrip("/").split("/")[-1] for one in (config.model.path, asked))
        return f"{model or 'no model'} on {task.removesuffix('.py')} with {config.objective.preset}"

    @property
    def shares_log(self) -> bool:
        """True if other runs may write to its experience log, so that version numbers are ambiguous."""
        return bool(self.config.run.experience)

    @property
    def generates(self) -> bool:
        return self.config.run.mode != "offline"

    def improvements(self) -> list[Improvement]:
        """Return predicted and realized improvement at each publish for which both are known."""
        if self.groups is None or self.shares_log or self.is_on_policy:
            return []
        refilled = self.config.sampler.refill
        return improvements(self.history, rewards_by_version(self.groups.columns), contrast_only=refilled)

    @property
    def is_on_policy(self) -> bool:
        """True if each batch comes from the policy it trains; the predicted gain is then 0 by construction."""
        return self.config.updates_per_batch == 1 and self.config.largest_lag == 0

    @property
    def imbalance(self) -> str:
        """Why the ledger does not balance; empty if it does."""
        try:
            if self.groups is not None:
                self.groups.ledger.check()
        except ConservationError as error:
            return str(error)
        return ""

    def fates(self) -> dict[str, int]:
        """Return the number of groups by fate, trained first, without fates that no group has."""
        if self.groups is None:
            return {}
        order = [Fate.TRAINED, Fate.WAITING, Fate.IN_FLIGHT, *Fate]
        return {fate.value: count for fate in dict.fromkeys(order) if (count := self.groups.ledger.counts[fate])}


def _without_lags(history: RunHistory) -> RunHistory:
    """Return the history of an offline run, whose groups have versions of other runs: no lag can be known."""
    steps = [
        replace(one, metrics={name: v for name, v in one.metrics.items() if name != "lag"}, by_lag={}, lags=())
        for one in history.steps
    ]
    return replace(history, steps=steps)
