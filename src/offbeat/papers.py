"""The experiments of two papers as runs: their arms, what was published, and what ours reached.

    paper · arm · seed ── settings ── a process of its own: train, or resume what was interrupted ── OUT/ARM-seedN
                                                              the run directories of all seeds ── table

A run has a process of its own, because only the end of a process gives back all memory of a GPU.
"""

import math
import os
import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Final, Self

from offbeat import api
from offbeat.config import Config, parse
from offbeat.config.parsing import apply_setting
from offbeat.errors import ConfigError, OffbeatError, RunError, suggest_nearest
from offbeat.evaluation import difference, interval
from offbeat.preflight.checks import device_plan, model_files
from offbeat.preflight.forecast import ASSUMED_GPU, forecast
from offbeat.reports.comparison import differing_settings, pool_seeds
from offbeat.reports.history import RunState, read_history, state_of
from offbeat.rollout.vllm_owner import live_with, start_time
from offbeat.run.directory import RunDirectory
from offbeat.words import count, signed

_CURVES: Final = "as with fresh data"
"""P1 shows curves and gives no figures."""


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    settings: tuple[str, ...]
    """As for `--set`; {steps} stands for the steps of the run."""
    published: str
    """What the paper reports, of one seed."""
    part: int = 1
    """It gets the steps of the paper divided by this."""


@dataclass(frozen=True)
class Paper:
    """The experiment of a paper that this table is about."""

    name: str
    toml: str
    """What all arms have in common."""
    arms: Mapping[str, Arm]
    short_steps: int
    """Steps for an evening, and other settings for it."""
    short: tuple[str, ...]
    remark: str
    """How it differs from the paper."""


_ON_ONE_GPU: Final = """
[task]
name = "gsm8k"

[engine]
kind = "vllm"
max_prompt_tokens = 512

[trainer]
token_budget = 16384
checkpoint_activations = true
"""

P1: Final = Paper(
    "p1",
    """# P1: Yao, Chen et al. 2025 (arXiv 2509.24203), GSM8K. Every arm is this file with other settings.
# From the authors' configuration (Trinity-RFT, examples/rec_gsm8k): batch, length, rate, steps, advantages, no KL term.
# Its default model has 3B parameters today; summaries of the paper name the one below: --model chooses.
steps = 100
prompts_per_step = 96
group_size = 8
objective.preset = "rec-oneside-nois"
model.path = "Qwen/Qwen2.5-1.5B-Instruct"
sampling.max_tokens = 1024
optimizer.learning_rate = 1e-6
evaluation.prompts = 1319  # all of the test split
workers.groups_at_once = 96
"""
    + _ON_ONE_GPU
    + "save_every = 10\n",
    {
        "nois-v1": Arm(("sync.every=1",), "fresh data"),
        "nois-v20": Arm(("sync.every=20",), _CURVES),
        "nois-offset10": Arm(("sync.every=1", "sync.offset=10"), _CURVES),
        # Every group is of version 0: the first publish comes after the last step.
        "nois-offline": Arm(("sync.every={steps}",), _CURVES),
        "is-v20": Arm(("sync.every=20", "objective.preset=rec-oneside-is"), _CURVES),
        "grpo-v20": Arm(("sync.every=20", "objective.preset=grpo"), _CURVES),
        "reinforce-v20": Arm(("sync.every=20", "objective.preset=reinforce", "accept=true"), "collapses"),
    },
    40,
    ("prompts_per_step=32", "workers.groups_at_once=32", "sampling.max_tokens=512", "evaluation.prompts=400"),
    "P1 shows curves of one seed and gives no figures. Prompt and verifier are ours.",
)  # fmt: skip

P2: Final = Paper(
    "p2",
    """# P2: Mroueh et al. 2025 (arXiv 2505.22257), section 5.1, GSM8K. Every arm is this file with other settings.
# From the paper: model, rate, KL, G, batch, length, temperature, four epochs, a reference renewed after each epoch.
# Its centered band is approximated in its runs by a clip around 1 (section 3), which is the preset below;
# --set objective.preset=grpo-off-policy runs the formula, which differs for v = 10 only.
steps = 1068  # four epochs of 267 batches
prompts_per_step = 28
group_size = 16
objective.preset = "grpo-masked"
objective.kl_coefficient = 0.1
reference.refresh_every = 267
model.path = "Qwen/Qwen2.5-0.5B-Instruct"
sampling.max_tokens = 200
sampling.temperature = 0.1
optimizer.learning_rate = 5e-6
evaluation.prompts = 1319  # all of the test split
evaluation.temperature = 0.1
workers.groups_at_once = 28
"""
    + _ON_ONE_GPU,
    {
        "v1": Arm(("objective.zero_variance_mask=false", "sync.every=1"), "45 % at most, unstable"),
        "v1-mask": Arm(("sync.every=1",), "50 %, stable"),
        "v10": Arm(("objective.zero_variance_mask=false", "sync.every=10"), "50 %, stable"),
        "v10-mask": Arm(("sync.every=10",), "–"),
        # One epoch: ten updates a batch made it ten times slower.
        "i10": Arm(
            ("objective.zero_variance_mask=false", "sync.every=1", "updates_per_batch=10"),
            "slower, in one epoch that takes ten times as long", 4,
        ),
        "i10-mask": Arm(("sync.every=1", "updates_per_batch=10"), "–", 4),
    },
    267,
    (),
    "Published figures are of one seed and of 50 samples a prompt, ours of one sample, all at temperature 0.1. Prompt "
    "and verifier are ours, so compare differences between arms rather than levels.",
)  # fmt: skip

PAPERS: Final[Mapping[str, Paper]] = {"p1": P1, "p2": P2}


@dataclass(frozen=True)
class Planned:
    """One run: an arm with a seed."""

    config: Config
    directory: RunDirectory
    command: str
    """What starts the same run by hand."""


@dataclass(frozen=True)
class Reproduction:
    """The chosen arms and seeds of a paper, and the directory of their runs."""

    paper: Paper
    out: Path
    arms: Sequence[str]
    seeds: Sequence[int] = (1,)
    steps: int | None = None
    short: bool = False
    settings: Sequence[str] = ()
    """More settings for every arm."""

    @classmethod
    def of(cls, paper: str, out: Path, arms: Sequence[str] = ()) -> Self:
        """Choose arms by name; without names, all. Raises `ConfigError` for a name that is not known."""
        known = PAPERS[paper].arms if paper in PAPERS else PAPERS
        if unknown := [one for one in (arms if paper in PAPERS else [paper]) if one not in known]:
            what = f"an arm of {paper}" if paper in PAPERS else "a paper"
            raise ConfigError([f"{one!r} is not {what}; {suggest_nearest(one, known)}" for one in unknown])
        return cls(PAPERS[paper], out, arms or tuple(known))

    @property
    def file(self) -> Path:
        """What all arms have in common, as a TOML file for `offbeat train` and `offbeat check`."""
        return self.out / f"{self.paper.name}.toml"

    def settings_of(self, arm: str, seed: int) -> list[str]:
        """Return what a run changes in the file. Its last step is one of those that are evaluated."""
        one, paper = self.paper.arms[arm], self.paper
        whole = paper.short_steps if self.short else int(tomllib.loads(paper.toml)["steps"])
        steps = self.steps or whole // one.part
        every = next(steps // parts for parts in (12, 5, 4, 3, 2, 1) if steps % parts == 0)
        own = [setting.format(steps=steps) for setting in one.settings]
        short = paper.short if self.short else ()
        return [f"seed={seed}", f"steps={steps}", f"evaluation.every={every}", *short, *own, *self.settings]

    def config_of(self, arm: str, seed: int) -> Config:
        """Return the configuration of a run; its model and its data are not looked at."""
        data = tomllib.loads(self.paper.toml)
        for setting in self.settings_of(arm, seed):
            apply_setting(data, setting)
        return parse(data)

    @property
    def resolution(self) -> str:
        """Which differences the test prompts of a run show, in words.

        >>> Reproduction.of("p2", Path("runs/p2")).resolution
        '1319 test prompts tell two runs apart from 3.8 points on (near 50 %); seeds differ beside that'
        """
        prompts = self.config_of(self.arms[0], self.seeds[0]).evaluation.prompts
        points = 196 * math.sqrt(2 * 0.25 / prompts)
        apart = f"{prompts} test prompts tell two runs apart from {points:.1f} points on (near 50 %)"
        return f"{apart}; seeds differ beside that"

    def planned(self, gpus: str | None = None) -> Iterator[Planned]:
        """Yield every run, the first seed of all arms first. Raises `ConfigError` if one cannot run.

        With `gpus`, such as "1x24", it is checked for that hardware instead of this machine.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.paper.toml, encoding="utf-8")
        for seed, arm in product(self.seeds, self.arms):
            settings, out = self.settings_of(arm, seed), self.out / f"{arm}-seed{seed}"
            words = [word for setting in settings for word in ("--set", setting)]
            command = shlex.join(["offbeat", "train", str(self.file), *words, "--out", str(out)])
            yield Planned(api.checked(self.file, {}, settings, gpus), RunDirectory(out), command)

    def devices(self, gpus: str) -> Iterator[tuple[str, str, float | None]]:
        """Yield each arm with its device plan and its hours for one seed, or with the reason why there is no plan.

        The hours are those of the arithmetic at an assumed speed, if every answer is as long as allowed.
        """
        for arm in self.arms:
            try:
                [run] = replace(self, arms=(arm,), seeds=self.seeds[:1]).planned(gpus)
            except ConfigError as error:
                yield arm, str(error), None
                continue
            seconds = forecast(run.config, model_files(run.config)).seconds(ASSUMED_GPU) * run.config.steps
            yield arm, str(device_plan(run.config, gpus)), seconds / 3600

    def run(self, say: Callable[[str], None]) -> list[str]:
        """Train what is not finished, and return which runs ended before their last step.

        After Ctrl-C the run ends after its step, and this with it. A run that fails before its first step is a
        `RunError`: the others would fail, too.
        """
        runs, failed = list(self.planned()), []
        for one in runs:
            _require_same(one)
        for number, one in enumerate(runs, start=1):
            state, path = _state(one.directory), one.directory.path
            if state is RunState.FINISHED:
                continue
            if state in (RunState.RUNNING, RunState.PAUSED):
                raise RunError(f"{path} is {state} in another process; wait for it, or stop that process first")
            say(f"run {number} of {len(runs)}: " + (f"offbeat resume {path}" if state else one.command))
            _in_own_process(one)
            if not read_history(one.directory).last_step:
                raise RunError(f"{path} failed before its first step, so no other run was started; see above")
            if _state(one.directory) is not RunState.FINISHED:
                failed.append(f"{path} ended before its last step; its last messages are above")
        return failed

    def table(self) -> str:
        """Return what the runs in the directory reached, of any seed, beside what was published."""
        rows: list[Sequence[str]] = [("arm", "seeds", "steps", "before", "highest", "last", "published")]
        finals: dict[str, list[float]] = {}
        for arm in self.arms:
            rows += self._rows(arm, finals)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", _READING, self.paper.remark, *_differences(finals)])

    def _rows(self, arm: str, finals: dict[str, list[float]]) -> Sequence[Sequence[str]]:
        """Return a row for the finished runs of an arm, and one for each run that is not finished."""
        found, rows, published = [], [], self.paper.arms[arm].published
        for path in sorted(self.out.glob(f"{arm}-seed*"), key=lambda path: (len(path.name), path.name)):
            if (state := _state(RunDirectory(path))) is None:
                continue
            config, history = RunDirectory(path).config(), read_history(RunDirectory(path))
            if state is RunState.FINISHED and history.pass_rates()[0]:
                found.append((path.name, config, (config, history.pass_rates()[1])))
            else:
                steps = f"{history.last_step} of {config.steps}"
                rows.append((arm, str(config.seed), steps, "", "", str(state), published))
        for pool in pool_seeds(found):
            seeds, steps = ", ".join(str(config.seed) for config, _ in pool.runs), str(pool.runs[0][0].steps)
            curves = [[value for value, _, _ in rates] for _, rates in pool.runs]
            reached = finals[arm] = [curve[-1] for curve in curves]
            _, low, high = pool.runs[0][1][-1]
            last = str(interval(reached)) if len(reached) > 1 else f"{reached[0]:.3f} [{low:.3f}, {high:.3f}]"
            before, highest = fmean(curve[0] for curve in curves), fmean(map(max, curves))
            rows.append((arm, seeds, steps, f"{before:.3f}", f"{highest:.3f}", last, published))
        return rows or [(arm, "none", "", "", "", "not begun", published)]


_READING: Final = (
    "pass@1 on test prompts: before training, at its highest, and last, with its 95 % interval over seeds, or of one "
    "seed over prompts."
)


def _differences(finals: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Compare each arm with the first one, if both have two seeds at least."""
    for arm, values in [*finals.items()][1:]:
        base, before = next(iter(finals.items()))
        if min(len(before), len(values)) > 1:
            found = difference(before, values)
            mean, low, high = (signed(value, 3) for value in (found.mean, found.low, found.high))
            yield f"{arm} − {base} = {mean} [{low}, {high}], {len(values)} and {count(len(before), 'seed')}"


def _state(directory: RunDirectory) -> RunState | None:
    """Return the state of a run; None if it has not begun."""
    if not directory.events.exists():
        return None
    return state_of(directory, read_history(directory), directory.config().steps)


def _require_same(one: Planned) -> None:
    """Raise `RunError` if the run was begun with other settings. The commit of its model is its own."""
    if _state(one.directory) is None:
        return
    begun, now = (config.settings | {"model.revision": None} for config in (one.directory.config(), one.config))
    if changed := differing_settings([begun, now]):
        raise RunError(
            f"{one.directory.path} was begun with other settings ({', '.join(changed)}); choose another --out, or the "
            "options that it was begun with"
        )


def _in_own_process(one: Planned) -> None:
    """Train or resume. Ctrl-C reaches the run as well, and is raised here when the run has ended."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        owner = (os.getpid(), start_time(os.getpid()))
        process = get_context("spawn").Process(target=_train, args=(one, owner))
        process.start()
        process.join()
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _train(one: Planned, owner: tuple[int, int]) -> None:
    """Train or resume in this process, which ends when its owner does."""
    live_with(*owner)
    try:
        if one.directory.events.exists():
            api.resume(one.directory.path)
        else:
            api.train(one.config, out=one.directory.path)
    except OffbeatError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
