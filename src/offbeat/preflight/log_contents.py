"""What an existing experience log holds for a run: whether it fits the objective, and for how many steps. No torch."""

from math import inf

from offbeat.config import Config
from offbeat.imports import missing_modules
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need


def check_log(config: Config) -> list[str]:
    """Check that the experience log a run starts from exists and holds what the objective needs."""
    uri, preset = config.run.experience, config.objective.preset
    replays = config.run.mode == "offline" or config.sampler.mode == "replay"
    if not uri or missing_modules(["lance"]):
        return []
    if not log_exists(uri):
        if config.run.mode != "offline":
            return []  # a run that generates creates it
        return [
            f"run.experience = {uri!r} is not an experience log; make one with `offbeat import FILE --into {uri} …`"
        ]
    from offbeat.errors import LogError
    from offbeat.experience.schema import Tables

    try:
        groups = Tables.open(uri, create=False).groups
        rows = groups.rows()
        known = groups.scan(0, rows, [], "logprobs_known").num_rows
        imported = groups.scan(0, rows, [], "oldest_version IS NULL").num_rows
    except LogError as error:
        return [f"run.experience = {uri!r}: {error}"]
    if not rows and config.run.mode == "offline":
        return [f"run.experience = {uri!r} holds no groups; add some with `offbeat import FILE --into {uri} …`"]
    any_age = [name for name, one in PRESETS.items() if one.lag_limit == inf]
    found = []
    if replays and rows and not known and Need.BEHAVIOR in config.objective.resolve().needs:
        suitable = ", ".join(name for name in any_age if Need.BEHAVIOR not in PRESETS[name].objective.needs)
        found.append(
            f"objective.preset = {preset!r} needs the behavior policy's log-probs, but none of the {rows} groups in "
            f"{uri} has them; choose one that needs none: {suitable}"
        )
    elif imported and config.run.mode != "offline" and preset not in any_age and not config.objective.untested_lag:
        found.append(
            f"run.experience = {uri!r} holds {imported} groups without a policy version, which may have any age, but "
            f"{preset!r} is reported up to lag {PRESETS[preset].lag_limit:g}; choose one of {', '.join(any_age)}, or "
            "set objective.untested_lag = true"
        )
    return found


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
