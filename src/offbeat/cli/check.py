"""`offbeat check`: everything that is wrong with a configuration, before anything is loaded; or what it will do."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.terminal import printable

if TYPE_CHECKING:
    from offbeat.config import Config

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting over the file's, as in sync.every=10; may be repeated"),
]


def check(
    config: Annotated[Path, typer.Argument(help="The run's TOML file")],
    settings: Settings = None,
) -> None:
    """Say what is wrong with a configuration, or what it will do: `offbeat check run.toml --set sync.every=10`."""
    parsed = checked(config, settings)
    typer.echo(parsed.plan)
    for line in _particulars(parsed):
        typer.echo(line)
    typer.echo(f"{config} can be run: offbeat train {config}")


def checked(path: Path, settings: list[str] | None) -> "Config":
    """A configuration that can be run here; otherwise the command ends with everything that is wrong."""
    from offbeat.check.preflight import preflight
    from offbeat.config import examine
    from offbeat.config.toml_file import TomlFile
    from offbeat.errors import ConfigError

    try:
        file = TomlFile.read(path, settings or [])
        examined = examine(file.data)
        examined = examined.also(preflight(examined.config))
        if examined.problems:
            raise ConfigError(file.located(examined.problems))
    except ConfigError as error:
        typer.echo(printable("\n".join(error.problems)), err=True)
        count = len(error.problems)
        typer.echo(
            "1 problem; nothing was started" if count == 1 else f"{count} problems; nothing was started", err=True
        )
        raise typer.Exit(2) from error
    return examined.config


def _particulars(config: "Config") -> list[str]:
    from offbeat.check.forecast import ModelFiles, forecast, machine_speed
    from offbeat.objective.presets import PRESETS

    preset = PRESETS[config.objective.preset]
    needs = ", ".join(sorted(need.value for need in config.objective.resolve().needs)) or "rewards alone"
    known = "data of any age" if preset.lag_limit == float("inf") else f"lag up to {preset.lag_limit:g}"
    expected = forecast(config, ModelFiles(Path(config.model.path)))
    speed = machine_speed()
    seconds = expected.seconds(speed)
    return [
        f"objective {preset.name}: needs {needs}; reported for {known} ({preset.lag_evidence})",
        f"{config.run.mode}, {config.steps} steps: {config.steps * config.prompts_per_step} groups of task "
        f"{config.task.name}, completions of at most {config.sampling.max_tokens} tokens by {config.engine.kind}",
        "estimates, from the model's files alone; the run measures before its first step:",
        *(f"  {line}" for line in str(expected).splitlines()),
        f"  at this CPU's {speed / 1e9:.0f} GFLOP/s, arithmetic alone: at most {_duration(seconds)} a step, "
        f"{_duration(seconds * config.steps)} in all; with a GPU a small part of it",
    ]


def _duration(seconds: float) -> str:
    """In the unit a person would use.

    >>> _duration(0.3), _duration(90.0), _duration(9000.0), _duration(900000.0)
    ('0.3 s', '1.5 min', '2.5 h', '10 days')
    """
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {name}"
    return f"{seconds:.1g} s" if seconds < 1 else f"{seconds:.0f} s"
