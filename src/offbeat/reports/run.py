"""A run directory, opened for reading from Python: metrics and evaluations as frames, groups, the policy, a plot."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from offbeat.config import Config
from offbeat.errors import RunError, suggest_nearest
from offbeat.reports.history import read_history, state_of
from offbeat.run.directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from offbeat.types import Group


@dataclass(frozen=True)
class Run:
    """A run directory, opened for reading; works while the run is training.

    >>> Run("runs/one").path.as_posix()
    'runs/one'
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def directory(self) -> RunDirectory:
        """Where each part of the run is stored."""
        return RunDirectory(self.path)

    @property
    def config(self) -> Config:
        """The configuration the run was started with, every default filled in."""
        return self.directory.config()

    @property
    def state(self) -> str:
        """'running', 'paused', 'finished', 'stopped' (before its last step) or 'crashed' (killed or failed)."""
        return str(state_of(self.directory, read_history(self.directory), self.config.steps))

    def metrics(self) -> "pd.DataFrame":
        """One row per step, one column per metric; steps that a resume took back are left out.

        `offbeat explain NAME` and docs/reference/metrics.md say what each metric means.
        """
        import pandas as pd

        steps = read_history(self.directory).steps
        return pd.DataFrame(
            [dict(one.metrics) for one in steps], index=pd.Index([one.step for one in steps], name="step")
        )

    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation: `pass@1` and the like, with `… low` and `… high` of its 95 % interval."""
        import pandas as pd

        rows = {}
        for point in read_history(self.directory).evaluations:
            cells = [(name, *estimate) for name, estimate in point.estimates.items()]
            rows[point.step] = {
                key: value for name, mid, low, high in cells
                for key, value in ((name, mid), (f"{name} low", low), (f"{name} high", high))
            }  # fmt: skip
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")

    def groups(self) -> "Iterator[Group]":
        """Yield every group in the run's experience log in the order of writing, late scores included."""
        from offbeat.experience.reader import LogReader
        from offbeat.experience.schema import Tables

        yield from LogReader(Tables.open(self.config.run.experience or str(self.directory.experience))).groups()

    def policy(self, dtype: str = "float32") -> "PreTrainedModel":
        """Load the policy of the newest checkpoint as a transformers model; every byte is verified first."""
        import torch

        from offbeat.trainer.export import load_policy

        return load_policy(self.path, dtype=getattr(torch, dtype))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the run's tokenizer."""
        from transformers import AutoTokenizer

        return cast(
            "PreTrainedTokenizerBase",
            AutoTokenizer.from_pretrained(str(self.directory.tokenizer), local_files_only=True),
        )

    def plot(self, *metrics: str, to: str | os.PathLike[str] = "curve.svg") -> Path:
        """Draw metrics by step into one SVG file and return its path; by default the mean reward and pass@1."""
        from offbeat.reports.plot import Plot, Series, standalone

        frame, series = self.metrics(), []
        for number, name in enumerate(metrics or ("reward_mean",)):
            if name not in frame:
                raise RunError(f"{self.path} has no metric {name!r}; {suggest_nearest(name, frame.columns)}")
            values = frame[name].dropna()
            series.append(Series(name, values.index.tolist(), values.tolist(), color=number))
        if not metrics and "pass@1" in (evaluated := self.evaluations()):
            values = evaluated["pass@1"]
            series.append(Series("pass@1", values.index.tolist(), values.tolist(), color=1))
        path = Path(to)
        path.write_text(standalone(Plot(self.path.name, series)), encoding="utf-8")
        return path
