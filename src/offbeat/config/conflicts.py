"""Settings that are valid by themselves and conflict with each other. No torch.

Every message starts with the key of a setting, so that `parsing.py` can add its line, and ends with what to do.
"""

from collections.abc import Callable, Iterable
from math import inf
from statistics import fmean
from typing import Final

from offbeat.config.config import Config
from offbeat.config.sections import SyncConfig
from offbeat.objective.spec import Advantage, Against, CentredBand, CutOff, Need, NoGate

SHARE_KEPT: Final = 0.8
"""A sampler that draws less than this part of its promised share in the second half of a run is refused."""


def conflicts(config: Config) -> list[str]:
    """Return the conflicts between sections."""
    modes = _mode_conflicts(config)
    found = (
        config.objective.problems()
        + _sampling_conflicts(config)
        + config.sync.problems()
        + config.evaluation.problems()
        + _adapter_conflicts(config)
        + modes
        + _cadence_conflicts(config)
    )
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
    objective = config.objective.resolve()
    if not modes and config.sampler.mode == "replay" and not config.run.experience:
        found += _replay_conflicts(config)
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


def _sampling_conflicts(config: Config) -> list[str]:
    """Return what makes the reported log-probs, or the completions, useless for the objective."""
    sampling, preset, objective = config.sampling, config.objective.preset, config.objective.resolve()
    found = sampling.problems()
    if sampling.truncated and Need.BEHAVIOR in objective.needs:
        found.append(
            f"sampling.top_p = {sampling.top_p}, top_k = {sampling.top_k}: {preset!r} needs "
            "the log-probs of the whole distribution, which truncation changes; set top_p = 1.0 and top_k = 0"
        )
    if sampling.min_tokens and Need.BEHAVIOR in objective.needs:
        found.append(
            f"sampling.min_tokens = {sampling.min_tokens}: {preset!r} needs the log-probs of the whole "
            "distribution, and a minimum length removes tokens from it; set sampling.min_tokens = 0, or "
            "sampling.ignore_eos = true for completions of one length"
        )
    if sampling.ignore_eos and objective.truncated is CutOff.MASK:
        found.append(
            "sampling.ignore_eos ends every completion at the length limit, and objective.truncated = 'mask' trains on "
            "none of those; set objective.truncated = 'score'"
        )
    return found


def _mode_conflicts(config: Config) -> list[str]:
    found = []
    if config.run.mode != "offline" and config.sampler.mode == "offline":
        found.append(
            f"run.mode = {config.run.mode!r} generates groups, but sampler.mode = 'offline' uses none of them; set "
            "run.mode = 'offline', or sampler.mode = 'fresh'"
        )
    if config.run.mode == "offline" and config.sampler.mode != "offline":
        found.append(f"sampler.mode = {config.sampler.mode!r}: run.mode = 'offline' needs sampler.mode = 'offline'")
    if config.run.mode != "offline" and config.sampler.wait_for_scores:
        found.append("sampler.wait_for_scores has no effect in runs that generate; remove it")
    has_task = config.evaluation.task or "name" in config.task.model_fields_set
    if config.run.mode == "offline" and config.asks and not has_task:
        found.append("task.name is not set: evaluations of an offline run need a task; set it, or evaluation.task")
    if config.run.mode == "offline" and not config.run.experience:
        found.append("run.experience = '': run.mode = 'offline' needs an experience log; set its path")
    if config.run.mode != "offline" and config.fresh < 1:
        found.append(
            f"sampler.share = {config.sampler.share} of prompts_per_step = {config.prompts_per_step} leaves no room "
            "for fresh groups; raise prompts_per_step, or lower sampler.share"
        )
    found += _inert_limits(config)
    if config.sync.offset and config.run.mode != "lockstep":
        found.append(
            f"sync.offset = {config.sync.offset}: a fixed offset needs run.mode = 'lockstep'; in concurrent mode set "
            "run.max_lag instead"
        )
    return found


def _cadence_conflicts(config: Config) -> list[str]:
    """Return why drift or cost could never decide."""
    sync, preset, objective = config.sync, config.objective.preset, config.objective.resolve()
    found = []
    if sync.adaptive and config.longest == 1:
        rule = "sync.by_cost" if sync.by_cost else f"sync.drift_budget = {sync.drift_budget}"
        rule = f"sync.cadence = {sync.cadence!r}" if sync.cadence else rule
        why = f", because {preset!r} is reported for fresh data only" if sync.every is None else ""
        found.append(
            f"{rule}: the longest time between two publishes is one step{why}, so there is nothing to decide; remove "
            f"{rule.partition(' ')[0]}"
        )
    blind = isinstance(objective.gate, NoGate | CentredBand) or objective.against is Against.PROXIMAL
    if sync.by_cost and blind and objective.reject is None:
        found.append(
            f"sync.by_cost: {preset!r} has no gate that stops tokens because of lag, so nothing would be published "
            "before the longest time; remove sync.by_cost, and set sync.every if it is not set"
        )
    return found


def _adapter_conflicts(config: Config) -> list[str]:
    """Return what an adapter cannot do, and settings that have no effect with one or without."""
    found = config.adapter.problems()
    if not config.adapter.rank:
        return found
    if config.reference.refresh_every:
        found.append(
            f"reference.refresh_every = {config.reference.refresh_every}: with adapter.rank = {config.adapter.rank} "
            "the reference policy is the model without its adapter, so that there is no second model; remove it"
        )
    if config.sync.anchor_every != SyncConfig().anchor_every:
        found.append(
            f"sync.anchor_every = {config.sync.anchor_every}: with adapter.rank = {config.adapter.rank} every version "
            "is complete; remove it"
        )
    return found


def _inert_limits(config: Config) -> list[str]:
    """Return limits of reuse that cannot act in this mode."""
    sampler = config.sampler
    limits = {"retire_drift": sampler.retire_drift, "retire_ess": sampler.retire_ess, "retire_age": sampler.retire_age}
    why = "sampler.mode = 'fresh' uses each group once"
    if sampler.mode == "offline":
        limits, why = {"retire_age": sampler.retire_age}, "sampler.mode = 'offline' does not know how old a group is"
    if sampler.mode == "replay":
        return []
    return [f"sampler.{name} = {value:g}: {why}; remove it" for name, value in limits.items() if value is not None]


def _replay_conflicts(config: Config) -> list[str]:
    """Return why a run draws far fewer past groups than `sampler.share` promises, if that is so."""
    sampler, wanted, drawn = config.sampler, config.prompts_per_step - config.fresh, _settled_replays(config)
    if _keeps_share(config):
        return []
    promise = (
        f"sampler.share = {sampler.share} promises {wanted} past groups a step, but about {drawn:.0f} can be drawn"
    )
    why = (
        f"each group is used at most {sampler.reuse_budget} times, again after {sampler.cooldown + 1} "
        f"{'step' if sampler.cooldown == 0 else 'steps'} at the earliest, and until it is {config.retire_age} steps old"
    )
    fixes = [
        first_fix(config, "sampler", "cooldown", range(sampler.cooldown - 1, -1, -1), _keeps_share),
        first_fix(config, "sampler", "retire_age", range(config.retire_age + 1, 201), _keeps_share),
        first_fix(config, "sampler", "reuse_budget", range(sampler.reuse_budget + 1, 33), _keeps_share),
        first_fix(config, "sampler", "share", (0.75, 0.5, 0.4, 0.3, 0.25, 0.2, 0.1), _keeps_share, below=sampler.share),
        first_fix(config, "sync", "every", range(config.longest - 1, 0, -1), _keeps_share),
    ]
    other = "set sampler.mode = 'fresh'"
    return [f"{promise}: {why}; {', or '.join(fix for fix in fixes if fix) or other}"]


def _settled_replays(config: Config) -> float:
    """Return the mean number of past groups that a step of the second half of the run can draw."""
    replays = config.replays()
    return fmean(replays[len(replays) // 2 :])


def _keeps_share(config: Config) -> bool:
    wanted = config.prompts_per_step - config.fresh
    return _settled_replays(config) >= SHARE_KEPT * wanted


def first_fix(
    config: Config,
    table: str,
    name: str,
    values: Iterable[float],
    works: Callable[[Config], bool],
    below: float = inf,
) -> str:
    """Return "set table.name = value" for the first value with which the configuration works, or nothing."""
    for value in values:
        section = getattr(config, table) if table else config
        changed = section.model_copy(update={name: value})
        if value < below and works(config.model_copy(update={table: changed}) if table else changed):
            return f"set {f'{table}.' if table else ''}{name} = {value:g}"
    return ""
