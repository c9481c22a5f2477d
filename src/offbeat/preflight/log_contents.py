"""What an existing experience log holds for a run: whether it fits the objective, and for how many steps. No torch."""

from dataclasses import dataclass
from typing import Final

from offbeat.config import Config
from offbeat.config.conflicts import conflicts
from offbeat.config.known import LagEvidence, with_preset
from offbeat.errors import LogError
from offbeat.imports import missing_modules
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need


@dataclass(frozen=True)
class LogContents:
    """How many groups the experience log holds that a run starts from."""

    groups: int = 0
    with_logprobs: int = 0
    without_version: int = 0

    @classmethod
    def of(cls, config: Config) -> "LogContents":
        """Read the log of a run; without one, there are no groups. Raises `LogError` if it cannot be read."""
        if not config.run.experience or missing_modules(["lance"]) or not log_exists(config.run.experience):
            return cls()
        from offbeat.experience.schema import Tables

        table = Tables.open(config.run.experience, create=False).groups
        rows = table.rows()
        return cls(rows, *(table.scan(0, rows, [], which).num_rows for which in COUNTED))


COUNTED: Final = ("logprobs_known", "oldest_version IS NULL")


def check_log(config: Config, parameters: float) -> list[str]:
    """Check that the experience log a run starts from exists and holds what the objective needs."""
    uri = config.run.experience
    if not uri or missing_modules(["lance"]):
        return []
    if not log_exists(uri):
        if config.run.mode != "offline":
            return []  # a run that generates creates it
        return [
            f"run.experience = {uri!r} is not an experience log; make one with `offbeat import FILE --into {uri} …`"
        ]
    try:
        return log_problems(config, LogContents.of(config), parameters)
    except LogError as error:
        return [f"run.experience = {uri!r}: {error}"]


def log_problems(config: Config, log: LogContents, parameters: float) -> list[str]:
    """Return what is missing in a log with these contents."""
    uri, preset, offline = config.run.experience, config.objective.preset, config.run.mode == "offline"
    if not log.groups and offline:
        return [f"run.experience = {uri!r} holds no groups; add some with `offbeat import FILE --into {uri} …`"]
    replays = offline or config.sampler.mode == "replay"
    if not (replays and log.groups and not log.with_logprobs and Need.BEHAVIOR in config.objective.resolve().needs):
        return []
    suitable = []
    for name, one in PRESETS.items():
        changed = with_preset(config, name)
        lost = not config.accept and lag_evidence(changed, log, parameters).losing_row() is not None
        if Need.BEHAVIOR not in one.objective.needs and not lost and not conflicts(changed):
            suitable.append(name)
    way = f"choose one of {', '.join(suitable)}, which need none" if suitable else "use a log with log-probs"
    return [
        f"objective.preset = {preset!r} needs the behavior policy's log-probs, but none of the {log.groups} groups in "
        f"{uri} has them; {way}"
    ]


def lag_evidence(config: Config, log: LogContents, parameters: float) -> LagEvidence:
    """Return the evidence about a run's lag. Groups without a version may have any age."""
    any_age = log.without_version > 0 and config.run.mode != "offline"
    return LagEvidence(config, parameters, any_age, logprobs=log.with_logprobs > 0 or not log.groups)


def offline_length(config: Config) -> str:
    """Say how many steps the log of an offline run holds; empty if that is not known.

    With `sampler.epochs` left out, the log is never used up.
    """
    uri, batch, epochs = config.run.experience, config.prompts_per_step, config.sampler.epochs
    if config.run.mode != "offline" or missing_modules(["lance"]) or not log_exists(uri):
        return ""
    from offbeat.experience.reader import LogReader

    ripe = LogReader.open(uri).index_since(None)[0].ripe
    groups, waiting = int(ripe.sum()), int((~ripe).sum())
    later = f"; {waiting} more wait for a score (`offbeat log pending {uri}`)" if waiting else ""
    if not groups:
        return f"{uri}: no group has its scores yet{later}"
    if epochs is None:
        passes = config.steps * min(batch, groups) / groups
        return f"{uri}: {groups} groups, so {config.steps} steps are {passes:.3g} passes over them{later}"
    steps = -(-groups * epochs // batch) if groups >= batch else epochs
    sum_ = f"{groups} groups × {epochs} epochs ÷ {batch} = {steps} steps"
    if groups < batch:
        sum_ = f"{groups} groups, all in one batch, × {epochs} epochs = {steps} steps"
    asked = "" if steps >= config.steps else f"; you asked for {config.steps}, and the run ends when the log is used up"
    return f"{uri}: {sum_}{asked}{later}"


def log_exists(uri: str) -> bool:
    """Return True if there is an experience log at `uri`."""
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")
