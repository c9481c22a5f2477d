"""A run directory, opened from Python: metrics and evaluations as frames, groups, the policy, a plot, the report."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.config import Config
from offbeat.errors import RunError, suggest_nearest
from offbeat.reports.history import read_history, state_of
from offbeat.reports.plot import Chart
from offbeat.run.directory import RunDirectory
from offbeat.run.event_loop import outside_event_loop
from offbeat.working import TICK, Working

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from offbeat.reports.gap import GapReport
    from offbeat.types import Group


@dataclass(frozen=True)
class Run:
    """A run directory. It can be opened at any time, also while the run is training.

        run = offbeat.Run("runs/one")
        run.metrics.tail()
        run.plot()
        run.generate("17+25=")

    >>> Run("nowhere")
    Traceback (most recent call last):
    offbeat.errors.RunError: nowhere holds no run; give the directory that a run was written to, such as runs/one
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))
        if not any(file.exists() for file in (self.path / "config.json", self.directory.events)):
            raise RunError(f"{self.path} holds no run; give the directory that a run was written to, such as runs/one")

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

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per step, one column per metric; steps that a resume took back are left out.

        `offbeat explain NAME` and docs/reference/metrics.md say what each metric means.
        """
        with Working("loading pandas", after=TICK):
            import pandas as pd

        steps = read_history(self.directory).steps
        return pd.DataFrame(
            [dict(one.metrics) for one in steps], index=pd.Index([one.step for one in steps], name="step")
        )

    def evaluations(self) -> "pd.DataFrame":
        """One row per evaluation: `pass@1` and the like, with `… low` and `… high` of its 95 % interval.

        `prompts` counts distinct prompts; `held_out` is False if the run is also trained on them.
        """
        import pandas as pd

        rows = {}
        for point in read_history(self.directory).evaluations:
            cells = [(name, *estimate) for name, estimate in point.estimates.items()]
            rows[point.step] = {"prompts": point.prompts, "held_out": point.held_out} | {
                key: value for name, mid, low, high in cells
                for key, value in ((name, mid), (f"{name} low", low), (f"{name} high", high))
            }  # fmt: skip
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")

    def groups(self) -> "Iterator[Group]":
        """Yield every group in the run's experience log in the order of writing, with text and late scores."""
        from offbeat.experience.reader import LogReader
        from offbeat.experience.schema import Tables
        from offbeat.tasks.tokenizer import in_words

        log = LogReader(Tables.open(self.config.run.experience or str(self.directory.experience)))
        yield from map(partial(in_words, tokenizer=self.tokenizer()), log.groups())

    def policy(self, dtype: str = "float32") -> "PreTrainedModel":
        """Load the policy of the newest checkpoint as a transformers model; every byte is verified first.

        Its weights have the values that engines compute with, `model.serve`, in any `dtype`.
        """
        with Working("loading the policy", after=TICK):
            import torch

            from offbeat.trainer.export import load_policy

            return load_policy(self.path, dtype=getattr(torch, dtype))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the run's tokenizer."""
        from offbeat.tasks.tokenizer import read_tokenizer

        return read_tokenizer(self.directory.tokenizer)

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        samples: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Return completions of a prompt, text or chat messages, by the policy of the newest checkpoint.

        Temperature and length are those of the run unless given; temperature 0 is greedy.
        """
        with Working("loading torch", after=TICK):
            from offbeat.run.evaluation.model import policy_sampler
        from offbeat.tasks.data import Example
        from offbeat.trainer.export import find_checkpoint

        settings = self.config.sampling
        heat = settings.temperature if temperature is None else temperature
        model, tokenizer = _load(self, find_checkpoint(self.path))
        sampler = policy_sampler(model, tokenizer, heat, max_tokens or settings.max_tokens)
        asked = Example("prompt", prompt if isinstance(prompt, str) else tuple(prompt))
        with Working("generating", after=TICK):
            return outside_event_loop(lambda: sampler.texts(asked, samples, seed))

    def plot(self, *metrics: str, to: str | os.PathLike[str] | None = None) -> Chart:
        """Draw metrics by step, by default the mean reward and pass@1. With `to`, write the SVG file as well."""
        from offbeat.reports.plot import Plot, Series, standalone

        frame, series = self.metrics, []
        for number, name in enumerate(metrics or ("reward_mean",)):
            if name not in frame:
                raise RunError(f"{self.path} has no metric {name!r}; {suggest_nearest(name, frame.columns)}")
            values = frame[name].dropna()
            series.append(Series(name, values.index.tolist(), values.tolist(), color=number))
        if not metrics and "pass@1" in (evaluated := self.evaluations()):
            values = evaluated["pass@1"].dropna()
            series.append(Series("pass@1", values.index.tolist(), values.tolist(), color=1))
        chart = Chart(standalone(Plot(self.path.name, series)))
        if to is not None:
            chart.save(to)
        return chart

    def report(self, to: str | os.PathLike[str] | None = None) -> Path:
        """Write the HTML report, by default into the run directory, and return its path."""
        path = Path(to) if to is not None else self.path / "report.html"
        with Working("writing the report", after=TICK):
            from offbeat.reports.page import write_report

            write_report([self.path], path)
        return path

    def gap(self, groups: int = 64) -> "GapReport":
        """Compute logged tokens again: which part of what the objective saw is engine mismatch, and which is lag?

        `groups` of the groups that the run trained on are computed, spread evenly. Print the result: it is a table.
        """
        with Working("computing log-probs again", after=TICK):
            from offbeat.reports.gap import measure_gap

            return measure_gap(self.directory, groups)

    def export(self, to: str | os.PathLike[str], dtype: str = "bfloat16") -> Path:
        """Write the policy of the newest checkpoint as a Hugging Face model directory, and return its path."""
        with Working("exporting the policy", after=TICK):
            import torch

            from offbeat.trainer.export import export

            export(self.path, Path(to), dtype=getattr(torch, dtype))
        return Path(to)


@lru_cache(maxsize=1)
def _load(run: Run, checkpoint: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load the policy of a run's newest checkpoint and its tokenizer; the next prompt uses them again."""
    return run.policy(), run.tokenizer()
