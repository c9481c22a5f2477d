"""What can be known before a run: `offbeat check` finds what is wrong with it, `explain` says what a name means."""

import shlex
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import printable
from offbeat.errors import suggest_nearest
from offbeat.working import SOON, Working

if TYPE_CHECKING:
    from offbeat.config import Config
    from offbeat.config.knobs import Knob
    from offbeat.metrics import Metric
    from offbeat.objective.presets import Preset
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
    """Say that the policy that is used is not the one that is trained."""
    model = config.model
    if model.compute != "float32" or model.serve == "float32":
        return []
    return [
        f"model.compute = 'float32', but model.serve = {model.serve!r}: engines, evaluations and exports have a "
        "rounded policy, and most of a small update is lost until it has grown; set model.serve = 'float32', or leave "
        "both at 'bfloat16'"
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


def objectives(
    name: Annotated[str | None, typer.Argument(help="Show one objective in full, for example: red-weight")] = None,
) -> None:
    """List the objectives, or show one in full: `offbeat objectives red-weight`."""
    from rich.console import Console
    from rich.table import Column, Table

    from offbeat.objective.presets import PRESETS

    console = Console()
    if name is None:
        table = Table(Column("name", no_wrap=True), "needs", "reported", Column("measured", no_wrap=True), "use")
        for preset in PRESETS.values():
            use = preset.use.partition(". ")[0].rstrip(".")
            table.add_row(preset.name, _needs(preset), f"{preset.reported_lag:g}", _measured(preset), use)
        console.print(table)
        console.print(
            "reported: the largest lag in papers. measured: steps between two publishes in our runs, ✓ tolerated, "
            "✗ not, ? undecided; each holds for a drift: `offbeat objectives NAME`",
            highlight=False,
        )
        return
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is not an objective; {suggest_nearest(name, PRESETS)}")
    preset = PRESETS[name]
    console.print(f"[bold]{preset.name}[/]  ({preset.source})", highlight=False)
    console.print(f"{preset.use}\n")
    console.print(f"maximizes   {preset.equation}", markup=False, highlight=False)
    console.print(f"needs       {_needs(preset)}", highlight=False)
    console.print(f"lag         reported up to {preset.reported_lag:g}: {preset.lag_evidence}", highlight=False)
    for one in preset.measured:
        console.print(f"            {one}", highlight=False)
    console.print(f"axes        {preset.objective}", markup=False, highlight=False)


def _measured(preset: "Preset") -> str:
    """Return the verdicts of our own runs in short: "5 ✓ 20 ✗"."""
    marks = {"tolerates": "✓", "fails": "✗", "undecided": "?"}
    return " ".join(f"{one.v} {marks[one.verdict]}" for one in preset.measured)


def _needs(preset: "Preset") -> str:
    return ", ".join(sorted(need.value for need in preset.objective.needs)) or "rewards alone"


def explain(
    name: Annotated[
        str | None,
        typer.Argument(help="A metric, setting, objective or event, for example: ess; without one, all are listed"),
    ] = None,
) -> None:
    """Explain a metric, a setting, an objective or an event: `offbeat explain ess`, `offbeat explain sync.every`.

    You can leave out the section of a setting: `offbeat explain top_p`. Without a name, everything is listed.
    """
    from offbeat.config.knobs import knobs
    from offbeat.events import EVENTS
    from offbeat.metrics import METRICS
    from offbeat.objective.presets import PRESETS

    if name is None:
        _list_all()
        return
    if name.startswith("offbeat/"):  # as TRL and verl report it, perhaps with its lag
        name = name.rpartition("/")[2]
    if name in METRICS:
        _print_metric(METRICS[name])
    if name in EVENTS:
        _print_event(name)
    if name in PRESETS:
        objectives(name)
    found = [knob for key, knob in knobs().items() if name in (key, key.rpartition(".")[2])]
    for knob in found:
        _print_setting(knob)
    every = [*METRICS, *knobs(), *PRESETS, *EVENTS]
    if not found and name not in every:
        raise typer.BadParameter(f"{name!r} is not a metric, setting, objective or event; {_hint(name, every)}")


def _hint(name: str, names: list[str]) -> str:
    near = suggest_nearest(name, [*names, *(one.rpartition(".")[2] for one in names if "." in one)])
    return near if near.startswith("did") else "list all with `offbeat explain`"


def _list_all() -> None:
    """Print one line for everything that can be explained, by group."""
    from offbeat.config.knobs import knobs
    from offbeat.events import EVENTS
    from offbeat.metrics import METRICS
    from offbeat.objective.presets import PRESETS

    sections: dict[str, dict[str, str]] = {}
    for key, knob in knobs().items():
        sections.setdefault(key.rpartition(".")[0], {})[key] = knob.meaning
    _print_group("metrics of a step", ((one.name, one.meaning) for one in METRICS.values()))
    for section, settings in sections.items():
        _print_group(f"settings in [{section}]" if section else "settings at the top of the file", settings.items())
    _print_group("objectives", ((one.name, one.use) for one in PRESETS.values()))
    _print_group("events of a run", ((kind, spec.meaning) for kind, spec in EVENTS.items()))
    typer.echo("one of them in full: offbeat explain NAME")


def _print_group(title: str, entries: Iterable[tuple[str, str]]) -> None:
    """Print a title and one line for each entry, cut to the width of the terminal."""
    rows = list(entries)
    indent = max(len(name) for name, _ in rows) + 4
    width = max(20, shutil.get_terminal_size().columns - indent)
    typer.echo(title)
    for name, meaning in rows:
        typer.echo(f"  {name}".ljust(indent) + textwrap.shorten(meaning, width, placeholder=" …"))
    typer.echo("")


def _print_event(name: str) -> None:
    from offbeat.events import EVENTS, EventKind

    spec = EVENTS[EventKind(name)]
    typer.echo(f"{name}: an event of a run, in events.jsonl")
    typer.echo(f"  {spec.meaning}")
    if spec.action:
        typer.echo(f"  what to do: {spec.action}")


def _print_metric(metric: "Metric") -> None:
    typer.echo(f"{metric.name} = {metric.formula}   ({metric.reduction.value})")
    typer.echo(f"  {metric.meaning}")
    typer.echo(f"  high: {metric.high}")
    typer.echo(f"  low:  {metric.low}")


def _print_setting(knob: "Knob") -> None:
    table, _, name = knob.key.rpartition(".")
    typer.echo(f"{knob.key}: {knob.kind}; " + (f"default {knob.default}" if knob.default else "no default"))
    typer.echo(f"  {knob.meaning}")
    value = knob.default or "…"
    typer.echo(
        f"  in the file: {f'[{table}] ' if table else ''}{name} = {value}    for one run: --set {knob.key}={value}"
    )
