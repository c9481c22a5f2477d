"""Settings that are valid by themselves and conflict with each other. No torch.

Every message starts with the key of a setting, so that `toml_file.py` can add its line, and ends with what to do.
"""

from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Final

from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import Advantage, Against, CentredBand, Need, NoGate

SHARE_KEPT: Final = 0.8
"""A sampler that draws less than this part of its promised share in the second half of a run is refused."""

if TYPE_CHECKING:
    from offbeat.config.config import Config


def conflicts(config: "Config") -> list[str]:
    """Return the conflicts between sections."""
    modes = _mode_conflicts(config)
    found = config.objective.problems() + config.sync.problems() + modes
    if config.updates_per_batch == 1:
        found += config.objective.problems_with_one_update()
    if config.optimizer.warmup_steps > config.steps:
        found.append(
            f"optimizer.warmup_steps = {config.optimizer.warmup_steps}: the run ends before the warm-up, at steps = "
            f"{config.steps}; set at most {config.steps}"
        )
    if config.run.max_lag is not None and config.run.max_lag < config.longest - 1 + config.sync.offset:
        found.append(
            f"run.max_lag = {config.run.max_lag}: with sync.every = {config.longest} workers could not generate "
            f"between two publishes; set at least {config.longest - 1 + config.sync.offset}"
        )
    if config.trainer.ranks > 1 and config.run.place == "local":
        found.append(f"trainer.ranks = {config.trainer.ranks}: a local run has one rank; set run.place = 'ray'")
    preset, objective = PRESETS[config.objective.preset], config.objective.resolve()
    if config.sampling.truncated and Need.BEHAVIOR in objective.needs:
        found.append(
            f"sampling.top_p = {config.sampling.top_p}, top_k = {config.sampling.top_k}: {preset.name!r} needs "
            "the log-probs of the whole distribution, which truncation changes; set top_p = 1.0 and top_k = 0"
        )
    if not modes and not config.objective.untested_lag and config.largest_lag > preset.lag_limit:
        found.append(_lag_conflict(config, preset))
    blind = isinstance(objective.gate, NoGate | CentredBand) or objective.against is Against.PROXIMAL
    if config.sync.by_cost and blind and objective.reject is None:
        found.append(
            f"sync.by_cost: {preset.name!r} has no gate that stops tokens because of lag, so nothing would be "
            "published before the longest time; use sync.every or sync.drift_budget, or a preset with a gate around 1"
        )
    if config.sampler.refill and objective.advantage is Advantage.SHRUNK:
        found.append(
            "sampler.refill drops groups of equal rewards, from which shrunk advantages learn by comparison with a "
            "prompt's earlier results; set sampler.refill = false, or choose another objective.advantage"
        )
    if config.reference.refresh_every and Need.REFERENCE not in objective.needs:
        found.append(
            f"reference.refresh_every = {config.reference.refresh_every}: no term uses the reference policy; "
            "set objective.kl_coefficient above 0, or remove reference.refresh_every"
        )
    return found


def _mode_conflicts(config: "Config") -> list[str]:
    found = []
    if config.run.mode != "offline" and config.sampler.mode == "offline":
        found.append(
            f"run.mode = {config.run.mode!r} generates groups, but sampler.mode = 'offline' uses none of them; set "
            "run.mode = 'offline', or sampler.mode = 'fresh'"
        )
    if config.run.mode == "offline" and config.sampler.mode != "offline":
        found.append(f"sampler.mode = {config.sampler.mode!r}: run.mode = 'offline' needs sampler.mode = 'offline'")
    if config.run.mode == "offline" and not config.run.experience:
        found.append("run.experience = '': run.mode = 'offline' needs an experience log; set its path")
    if config.run.mode != "offline" and config.fresh < 1:
        found.append(
            f"sampler.share = {config.sampler.share} of prompts_per_step = {config.prompts_per_step} leaves no room "
            "for fresh groups; raise prompts_per_step, or lower sampler.share"
        )
    elif config.sampler.mode == "replay" and not config.run.experience:
        found += _replay_conflicts(config)
    found += _inert_limits(config)
    if config.sync.offset and config.run.mode != "lockstep":
        found.append(
            f"sync.offset = {config.sync.offset}: a fixed offset needs run.mode = 'lockstep'; in concurrent mode set "
            "run.max_lag instead"
        )
    return found


def _inert_limits(config: "Config") -> list[str]:
    """Return limits of reuse that cannot act in this mode."""
    sampler = config.sampler
    limits = {"retire_drift": sampler.retire_drift, "retire_ess": sampler.retire_ess, "retire_age": sampler.retire_age}
    why = "sampler.mode = 'fresh' uses each group once"
    if sampler.mode == "offline":
        limits, why = {"retire_age": sampler.retire_age}, "sampler.mode = 'offline' does not know how old a group is"
    if sampler.mode == "replay":
        return []
    return [f"sampler.{name} = {value:g}: {why}; remove it" for name, value in limits.items() if value is not None]


def _replay_conflicts(config: "Config") -> list[str]:
    """Return why a run draws far fewer past groups than `sampler.share` promises, if that is so."""
    sampler, age, preset = config.sampler, config.retire_age, config.objective.preset
    wanted, replays = config.prompts_per_step - config.fresh, config.replays()
    settled = fmean(replays[len(replays) // 2 :])
    if settled >= SHARE_KEPT * wanted:
        return []
    promise = (
        f"sampler.share = {sampler.share} promises {wanted} past groups a step, but only {settled:.3g} can be drawn"
    )
    if age <= sampler.cooldown:
        rested = f"a group may be drawn again after {sampler.cooldown + 1} steps and is retired after {age}"
        limit = PRESETS[preset].lag_limit
        ways = "lower sampler.cooldown, " if sampler.cooldown else ""
        return [
            f"{promise}: {rested}; {ways}raise sampler.retire_age as far as the preset's lag limit allows "
            f"({preset!r}: {limit:g}), or choose another preset"
        ]
    if config.steps <= sampler.cooldown + 1:
        return [f"{promise}: the run ends after {config.steps} steps, before the first group may be drawn again"]
    return [
        f"{promise}: each of the {config.fresh} fresh groups a step is used sampler.reuse_budget = "
        f"{sampler.reuse_budget} times in all and for at most {age} steps; lower sampler.share, or raise "
        "sampler.reuse_budget"
    ]


def _lag_conflict(config: "Config", preset: Preset) -> str:
    limit, lag, steps = preset.lag_limit, config.largest_lag, config.steps_within_limit()
    tolerant = ", ".join(p.name for p in PRESETS.values() if p.lag_limit >= lag)
    ways = [f"choose one of {tolerant}" if tolerant else "", "set objective.untested_lag = true"]
    if config.run.mode == "offline":
        setting, valid = "run.mode = 'offline' trains on data of any age", ""
    elif config.sampler.mode == "replay" and config.retire_age > config.fresh_lag:
        setting, valid = f"sampler.retire_age = {config.retire_age}", f"sampler.retire_age = {steps}"
    elif config.run.max_lag is not None:
        setting, valid = f"run.max_lag = {config.run.max_lag}", f"run.max_lag = {steps}"
    elif config.sync.offset:
        setting, valid = f"sync.offset = {config.sync.offset}", f"sync.offset = {max(0, steps + 1 - config.longest)}"
    else:
        setting, valid = f"sync.every = {config.longest}", f"sync.every = {steps + 1}"
    if config.updates_per_batch > 1 and lag < inf:
        setting += f" with updates_per_batch = {config.updates_per_batch}"
        if config.updates_per_batch - 1 > limit:
            valid = f"updates_per_batch = {max(1, int(limit) + 1)}"
    gives = "" if lag == inf else f" gives lag up to {lag:g}"
    fixes = [f"set {valid}" if valid else "", *ways]
    return (
        f"{setting}{gives}, but {preset.name!r} is reported up to lag {limit:g} ({preset.lag_evidence}); "
        + ", or ".join(fix for fix in fixes if fix)
    )
