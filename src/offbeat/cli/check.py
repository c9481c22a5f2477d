"""`offbeat check`: find every problem in a configuration before anything is loaded, and show what it will do."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import printable
from offbeat.reports.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.preflight.forecast import Lengths

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting of the file, for example sync.every=10; can be repeated"
    ),
]
Accept = Annotated[
    bool, typer.Option("--accept", help="Accept a lag that is known to lose; the same as --set accept=true")
]


def check(
    config: Annotated[Path, typer.Argument(help="The TOML file of the run")],
    settings: Settings = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="GPUSxGIB",
            help="Plan the run for other hardware: 1x24, 8x80, or 4x8x80 for four nodes of eight",
        ),
    ] = None,
    accept: Accept = False,
) -> None:
    """Check a configuration and show what it will do: `offbeat check run.toml --gpus 8x80`."""
    settings = [*(settings or []), *(["accept=true"] if accept else [])]
    parsed = checked(config, settings, gpus)
    typer.echo(parsed.plan)
    with Working("estimating memory and time", after=SOON):
        lines = _particulars(parsed, gpus)
    for line in lines:
        typer.echo(line)
    overrides = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    typer.echo(f"{config} is valid; start it with: offbeat train {config}{overrides}")


def checked(path: Path, settings: list[str] | None, gpus: str | None = None, *, to_run: bool = False) -> "Config":
    """Return a configuration that can run here, or end the command with a list of all problems."""
    from offbeat.errors import ConfigError
    from offbeat.imports import paused_collector

    try:
        # To run, torch is loaded.
        with Working("checking the configuration", after=0.0 if to_run else SOON), paused_collector():
            from offbeat import api

            return api.checked(path, {}, settings or [], gpus, to_run=to_run)
    except ConfigError as error:
        typer.echo(printable("\n".join(error.problems)), err=True)
        count = len(error.problems)
        typer.echo(
            "1 problem; nothing was started" if count == 1 else f"{count} problems; nothing was started", err=True
        )
        raise typer.Exit(2) from error


def _particulars(config: "Config", gpus: str | None) -> list[str]:
    from offbeat.preflight.checks import device_plan, lag_findings, missing_engine

    preset = config.objective.known
    needs = ", ".join(sorted(need.value for need in config.objective.resolve().needs)) or "rewards alone"
    known = "data of any age" if preset.reported_lag == float("inf") else f"lag up to {preset.reported_lag:g}"
    reported = f"reported for {known} ({preset.lag_evidence})"
    if not preset.source:
        reported = f"{preset.lag_evidence}, so begin with v = 1 and watch drift_tv_token and ess"
    return [
        f"objective {preset.name}: needs {needs}; {reported}",
        *(f"in our runs it {one}" for one in preset.measured),
        *(f"warning: {finding.text}" for finding in lag_findings(config)),
        *(f"your own {setting}: {reference}" for setting, reference in config.own_parts),
        _amount(config),
        *([config.evaluation_plan] if config.evaluation_plan else []),
        *_model(config),
        *filter(None, [missing_engine(config) if gpus is None else ""]),
        *_rounding(config),
        *_adapter(config),
        *_small_groups(config),
        *(_estimates(config) if gpus is None else [f"devices {device_plan(config, gpus)}"]),
    ]


def _estimates(config: "Config") -> list[str]:
    from offbeat.errors import ModelUnreadable
    from offbeat.preflight.checks import model_files
    from offbeat.preflight.forecast import data_lengths, forecast, speed_now

    try:
        files = model_files(config)
        lengths = data_lengths(config, files)
        expected = forecast(config, files, lengths)
    except ModelUnreadable as error:
        return [f"no estimate of memory and time: {error}; the run measures before its first step"]
    speed = speed_now()
    seconds = expected.seconds(speed)
    total = seconds * config.steps
    busy = f" ({_duration(total / speed.free)} if others stay as busy as now)" if speed.free < 0.8 else ""
    return [
        "estimates from the model files; the run measures before its first step:",
        *(f"  {line}" for line in str(expected).splitlines()),
        f"  at this CPU's {speed.products / 1e9:.0f} GFLOP/s: about {_duration(seconds)} a step, "
        f"{_duration(total)} in total{busy}; a GPU takes a small part of that",
        f"  {_described(config, lengths)}",
    ]


def _described(config: "Config", lengths: "Lengths | None") -> str:
    """Say which lengths an estimate of time is for."""
    if config.run.mode == "offline" and lengths is not None:
        return f"for rows of {lengths.completion:.0f} tokens, the mean of the log"
    prompt = f"prompts of {lengths.prompt:.0f} tokens, the mean of the data" if lengths else "the longest prompts"
    return f"for {prompt}, and completions of {config.sampling.max_tokens} tokens, the longest: shorter ones take less"


def _model(config: "Config") -> list[str]:
    """Say which commit of a model of the hub the run would use, and what has to be downloaded first."""
    from offbeat.hub import find_model, hub_name

    if hub_name(config.model.path) is None:
        return []
    model = find_model(config.model.path, config.model.revision)
    missing = model.missing_bytes
    size = f"{missing / 1e9:.1f} GB" if missing >= 1e8 else f"{missing / 1e6:.1f} MB"
    how = f"{size} to download when the run starts" if missing else "downloaded"
    return [f"model {model.name} of the hub at commit {model.commit[:12]}: {how}"]


def _rounding(config: "Config") -> list[str]:
    """Say that engines would not sample from the policy that is trained."""
    model = config.model
    if config.run.mode == "offline" or model.compute != "float32" or model.serve == "float32":
        return []
    return [
        f"model.compute = 'float32', but engines serve {model.serve}: they sample from a rounded policy, and most of a "
        "small update is lost until it has grown; set model.serve = 'float32', or leave both at 'bfloat16'"
    ]


def _adapter(config: "Config") -> list[str]:
    """Say what is trained beside a frozen model, and whether the learning rate suits it."""
    from offbeat.config.sections import FULL_RATE

    adapter, rate = config.adapter, config.optimizer.learning_rate
    if not adapter.rank:
        return []
    what = f"adapter of rank {adapter.rank} beside {', '.join(adapter.names)}; all other weights stay as they are"
    if rate > FULL_RATE:
        return [what]
    return [
        what,
        f"optimizer.learning_rate = {rate:g} looks like a rate for training all weights; an adapter needs about 10 × "
        f"the rate of full training: try {10 * rate:g}",
    ]


def _small_groups(config: "Config") -> list[str]:
    """Say how groups that are often all right or all wrong can teach something."""
    from offbeat.objective.spec import Advantage

    if config.group_size > 2 or config.objective.resolve().advantage is Advantage.SHRUNK:
        return []
    return [
        f"group_size = {config.group_size}: many groups are all right or all wrong and teach nothing; if prompts come "
        'again, objective.advantage = "shrunk" compares them with earlier results of their prompt'
    ]


def _amount(config: "Config") -> str:
    """Say how many groups the run generates, or that it generates none."""
    if config.run.mode == "offline":
        from offbeat.preflight.checks import offline_length

        length = offline_length(config)
        return f"offline, {config.steps} steps of {config.prompts_per_step} groups" + (f"; {length}" if length else "")
    groups = config.steps * config.fresh
    return (
        f"{config.run.mode}, {config.steps} steps: {groups} groups of task {config.task.name}, completions of at most "
        f"{config.sampling.max_tokens} tokens by {config.engine.kind}"
    )


def _duration(seconds: float) -> str:
    """Return a duration in a readable unit.

    >>> _duration(0.3), _duration(90.0), _duration(9000.0), _duration(900000.0)
    ('0.3 s', '1.5 min', '2.5 h', '10 days')
    """
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {name}"
    return f"{seconds:.1g} s" if seconds < 1 else f"{seconds:.0f} s"
