"""What an existing experience log holds for a run: whether it fits the objective, and for how many steps. No torch."""

from dataclasses import dataclass, replace
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
    """What the experience log that a run starts from holds, in groups."""

    groups: int
    with_logprobs: int
    without_version: int

    @classmethod
    def of(cls, config: Config) -> "LogContents":
        """Count the groups of the run's log; none if there is no log yet. Raises `LogError` if it cannot be read."""
        if not config.run.experience or missing_modules(["lance"]) or not _exists(config.run.experience):
            return cls(0, 0, 0)
        from offbeat.experience.schema import Tables

        groups = Tables.open(config.run.experience, create=False).groups
        rows = groups.rows()
        known, imported = (groups.scan(0, rows, [], which).num_rows for which in ("logprobs_known", UNVERSIONED))
        return cls(rows, known, imported)


UNVERSIONED: Final = "oldest_version IS NULL"


def check_log(config: Config, parameters: float) -> list[str]:
    """Check that the experience log a run starts from exists and holds what the objective needs."""
    uri, preset = config.run.experience, config.objective.preset
    if not uri or missing_modules(["lance"]):
        return []
    if not _exists(uri):
        if config.run.mode != "offline":
            return []  # a run that generates creates it
        return [
            f"run.experience = {uri!r} is not an experience log; make one with `offbeat import FILE --into {uri} …`"
        ]
    try:
        log = LogContents.of(config)
    except LogError as error:
        return [f"run.experience = {uri!r}: {error}"]
    if not log.groups and config.run.mode == "offline":
        return [f"run.experience = {uri!r} holds no groups; add some with `offbeat import FILE --into {uri} …`"]
    replays = config.run.mode == "offline" or config.sampler.mode == "replay"
    if replays and log.groups and not log.with_logprobs and Need.BEHAVIOR in config.objective.resolve().needs:
        suitable = _without_logprobs(config, lag_evidence(config, parameters))
        way = f"choose one of {', '.join(suitable)}, which need none" if suitable else "use a log with log-probs"
        return [
            f"objective.preset = {preset!r} needs the behavior policy's log-probs, but none of the {log.groups} groups "
            f"in {uri} has them; {way}"
        ]
    return []


def lag_evidence(config: Config, parameters: float) -> LagEvidence:
    """Return the evidence about a run's lag, with what its log holds. Groups without a version may have any age."""
    try:
        log = LogContents.of(config)
    except LogError:  # `check_log` reports it
        return LagEvidence(config, parameters)
    any_age = log.without_version > 0 and config.run.mode != "offline"
    return LagEvidence(config, parameters, any_age, logprobs=log.with_logprobs > 0 or not log.groups)


def _without_logprobs(config: Config, evidence: LagEvidence) -> list[str]:
    """Return the presets that need no log-probs and are not known to lose here."""
    found = []
    for name, preset in PRESETS.items():
        changed = with_preset(config, name)
        if Need.BEHAVIOR in preset.objective.needs or conflicts(changed):
            continue
        if config.accept or replace(evidence, config=changed).losing_row() is None:
            found.append(name)
    return found


def offline_length(config: Config) -> str:
    """Say how many steps the log of an offline run holds; empty if that is not known.

    With `sampler.epochs` left out, the log is never used up.
    """
    uri, batch, epochs = config.run.experience, config.prompts_per_step, config.sampler.epochs
    if config.run.mode != "offline" or missing_modules(["lance"]) or not _exists(uri):
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


def _exists(uri: str) -> bool:
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")
