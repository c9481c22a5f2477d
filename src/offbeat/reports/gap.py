"""Which part of the ratio is the engine's? Logged tokens, computed again with the trainer's arithmetic.

    log π_k/α  =  log π_version/α  +  log π_k/π_version
    what the      engine mismatch     lag
    objective saw

α is what the engine recorded when it sampled, π_version has the weights of the version recorded with the token, and π_k
is the policy with which the step began. If the run has kept π_k neither as a version nor as a checkpoint, its log-probs
are fitted: on the line from those of π_version to those of the next policy that was kept, at the point where the mean
(1 − ρ)₊ of the group is the one that the trainer recorded in that step.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import RunError
from offbeat.objective.bound import shortfall
from offbeat.objective.losses import bounded_exp
from offbeat.objective.measures import LAG_BUCKETS, bucket_indices
from offbeat.reports.groups import RunGroups
from offbeat.reports.kept_policies import KeptPolicies, KeptPolicy, TokenLogProbs
from offbeat.run.directory import RunDirectory
from offbeat.types import UNKNOWN, Completion, Group, Score
from offbeat.weights.subscriber import Subscription
from offbeat.words import count

ROUNDING: Final = 1e-4
"""A mean |Δlogp| up to this is rounding."""
LATE: Final = 0.5
"""The engine is late if the version before explains its log-probs with less than this share of the mean |Δlogp|."""
FARTHEST: Final = 4.0
"""How far a fitted policy may be, as a multiple of the way to the next one that was kept."""


@dataclass(frozen=True)
class RatioPart:
    """How far a ratio is from 1, on some tokens."""

    size: float
    """Mean |Δlogp|."""
    tv: float
    """Mean (1 − ρ)₊."""
    shift: float
    """What it adds to mean (ρ − 1) of the whole."""


@dataclass(frozen=True)
class GapRow:
    """The tokens of one lag bucket."""

    lag: str
    tokens: int
    """Once for each step that trained on them."""
    engine: RatioPart
    """π_version against α."""
    lagged: RatioPart | None
    """π_k against π_version, of the tokens whose π_k is known."""
    whole: RatioPart | None
    """π_k against α, of the same tokens: what the objective saw."""
    recorded: float | None
    """Mean (1 − ρ)₊ of their groups, as the trainer measured it in these steps."""

    def __str__(self) -> str:
        columns = []
        for name, form in (("size", ".2g"), ("tv", ".2g"), ("shift", "+.1g")):
            values = [None if part is None else getattr(part, name) for part in (self.engine, self.lagged, self.whole)]
            values += [self.recorded] if name == "tv" else []
            columns.append(" ".join(f"{'–' if one is None else format(one, form):>8}" for one in values))
        return "   ".join([f"{self.lag:>5} {self.tokens:>8}", *columns])


_HEAD: Final = (
    f"{'':14}   {'mean |Δlogp|':>26}   {'mean (1 − ρ)₊':>35}   {'mean ρ − 1':>26}\n"
    f"  lag   tokens   {'  engine      lag    whole'}   {'  engine      lag    whole recorded'}   "
    "  engine      lag    whole"
)


@dataclass(frozen=True)
class GapReport:
    """The gap of a run by lag. As text it is a table with a verdict."""

    rows: tuple[GapRow, ...]
    total: GapRow
    groups: int
    """Groups that were computed again, of `trained`, which have versions."""
    trained: int
    gone: int
    """Tokens of the trained groups, prompts included, whose version the weight log no longer has."""
    sources: Mapping[str, int]
    """Tokens by what is known of π_k: `published`, `checkpoint`, `fitted` or `unknown`."""
    earlier: float | None
    """Mean |Δlogp| of the version before the recorded one against α; None if there is none."""
    rounded: bool
    """True if a publish rounds the weights. That is part of lag where π_k is a checkpoint, else only of `recorded`."""

    @property
    def share(self) -> float | None:
        """The engine's share of what the ratio sees, by mean (1 − ρ)₊. None if no lag could be computed."""
        lag, engine = self.total.lagged, self.total.engine
        return None if lag is None or not lag.tv + engine.tv else engine.tv / (lag.tv + engine.tv)

    @property
    def late(self) -> bool:
        """True if the version before the recorded one fits the engine's log-probs much better."""
        size = self.total.engine.size
        return self.earlier is not None and size > ROUNDING and self.earlier < LATE * size

    @property
    def verdict(self) -> str:
        """What part the engine has, and what to do about it."""
        engine, lag = self.total.engine, self.total.lagged
        found = f"mean (1 − ρ)₊ {engine.tv:.2g} of the engine" + (f", {lag.tv:.2g} of lag" if lag else "")
        if engine.size <= ROUNDING:
            return f"engine and trainer compute alike: {found}. What the ratio sees is lag."
        part = "" if self.share is None else f" is {self.share:.0%} of what the ratio sees"
        if self.late:
            advice = (
                f"The version before the recorded one fits better (mean |Δlogp| {self.earlier:.2g} instead of "
                f"{engine.size:.2g}): the engine generates with weights that are one version late. Check how it loads "
                "them; no setting of lag helps."
            )
        elif self.share is not None and self.share < 0.1:
            advice = "Lag decides: lower sync.every, run.max_lag or the learning rate if it is too much."
        else:
            advice = (
                "Publishing more often leaves this part: give model.compute and model.serve one dtype, or correct for "
                "it with the preset tis."
            )
        return f"engine mismatch{part}: {found}. {advice}"

    def __str__(self) -> str:
        lines = [_HEAD, *map(str, self.rows), *([str(self.total)] if len(self.rows) > 1 else []), ""]
        known = ", ".join(f"{tokens} {source}" for source, tokens in self.sources.items())
        lines.append(
            f"{self.groups} of {count(self.trained, 'trained group')}; tokens by what is known of π_k: {known}"
        )
        if self.gone:
            lines.append(f"{self.gone} tokens, prompts included, are of versions that the weight log no longer has")
        if self.rounded:
            lines.append("a publish rounds weights: this is in lag where π_k is a checkpoint, else only in `recorded`")
        return "\n".join([*lines, self.verdict])


@dataclass(frozen=True)
class _Use:
    """A group in a step that trained on it, with the completions whose log-probs can be compared."""

    group: Group
    k: int
    recorded: float | None
    after: KeptPolicy | None
    """π_k, or the next policy that was kept."""

    @property
    def source(self) -> str:
        """What is known of π_k."""
        if self.after is None or (self.after.step > self.k and self.recorded is None):
            return "unknown"
        return self.after.where if self.after.step == self.k else "fitted"


def measure_gap(directory: RunDirectory, groups: int = 64) -> GapReport:
    """Split what the objective saw into engine mismatch and lag, on at most `groups` of a run's trained groups.

    They are spread evenly over those whose version the weight log still has. The model is loaded on one device.
    """
    logged = _open(directory)
    trained = [at for at in range(len(logged)) if logged.lags(at)]
    with Subscription.open(directory.weights, name="gap") as versions:
        policies = KeptPolicies(directory, directory.config(), versions)
        here = [at for at in trained if int(logged.columns.oldest_version[at]) in policies.published]
        chosen = [here[turn * len(here) // groups] for turn in range(groups)] if len(here) > groups else here
        uses = [use for at in chosen for use in _uses(logged, at, policies)]
        if not uses:
            raise RunError(
                f"{directory.path}: no token of {count(len(trained), 'trained group')} has a log-prob and a version "
                f"that the weight log still has ({list(policies.published)}); ask while the run trains"
            )
        wanted: dict[KeptPolicy, dict[str, Group]] = {}
        for use in uses:
            for policy in _needed(use, policies):
                wanted.setdefault(policy, {})[use.group.id] = use.group
        computed = policies.logprobs({policy: some.values() for policy, some in wanted.items()})
    tokens, sources = [_tokens(use, policies, computed) for use in uses], Counter[str]()
    for use, some in zip(uses, tokens, strict=True):
        sources[use.source] += some.shape[1]
    gone = sum(int(logged.columns.tokens[at]) for at in {*trained} - {*here})
    tokens_5T = torch.cat(tokens, 1)
    buckets_T, earlier_T = bucket_indices(tokens_5T[3].long()), tokens_5T[2][~tokens_5T[2].isnan()]
    return GapReport(
        rows=tuple(_row(LAG_BUCKETS[at], tokens_5T[:, buckets_T == at]) for at in buckets_T.unique().tolist()),
        total=_row("all", tokens_5T),
        groups=len(chosen),
        trained=len(trained),
        gone=gone,
        sources=sources,
        earlier=float(earlier_T.abs().mean()) if len(earlier_T) else None,
        rounded=policies.rounded,
    )


def _open(directory: RunDirectory) -> RunGroups:
    """Open the groups of a run. Raise if their log-probs cannot be computed again."""
    config = directory.config()
    if not directory.weights.exists():
        raise RunError(
            f"{directory.path} has no weight log, so there is no version to compute log-probs with: offline runs and "
            "runs inside other trainers publish none"
        )
    if config.sampling.truncated or config.sampling.min_tokens:
        raise RunError(
            f"{directory.path} samples with top_p, top_k or min_tokens: the trainer does not compute the log-probs of "
            "the distribution that was sampled from"
        )
    if (logged := RunGroups.open(directory, config)) is None:
        raise RunError(f"{directory.path} has no experience log yet; ask after its first step")
    return logged


def _uses(logged: RunGroups, place: int, policies: KeptPolicies) -> Iterator[_Use]:
    [group] = logged.read([place])
    comparable = Group(group.id, group.prompt, tuple(filter(_is_comparable, group.completions)))
    fate = logged.ledger.fates[group.id]
    for step, recorded in zip(fate.steps, fate.drift, strict=True):
        if comparable.completions:
            yield _Use(comparable, step - 1, recorded, policies.find(step - 1))


def _is_comparable(one: Completion) -> bool:
    known = one.behavior_logprobs is not UNKNOWN and bool(one.versions)
    return known and isinstance(one.score, Score) and len(one.token_ids) > 0


def _needed(use: _Use, policies: KeptPolicies) -> Iterator[KeptPolicy]:
    """Yield the policies that a use is computed under: of its versions, of those before them, and π_k."""
    for version in {span.version for one in use.group.completions for span in one.versions} & {*policies.published}:
        yield KeptPolicy(version, "published")
        if (before := policies.before(version)) is not None:
            yield before
    if use.after is not None:
        yield use.after


def _tokens(use: _Use, policies: KeptPolicies, computed: Mapping[tuple[KeptPolicy, str], TokenLogProbs]) -> Tensor:
    """Return five rows: log π_version/α, log π_k/π_version, log of the version before/α, lag, and what was recorded.

    A token has a column if the policy wrote it and its version is kept. NaN is unknown.
    """
    columns = []
    for place, one in enumerate(use.group.completions):
        own_T, earlier_T, after_T, lags_T = np.full((4, len(one.token_ids)), np.nan)
        if use.after is not None:
            after_T[:] = computed[use.after, use.group.id][place]
        for span in one.versions:
            if span.version in policies.published and span.version <= use.k:
                at, before = slice(span.start, span.end), policies.before(span.version)
                own_T[at] = computed[KeptPolicy(span.version, "published"), use.group.id][place][at]
                lags_T[at] = use.k - span.version
                if before is not None:
                    earlier_T[at] = computed[before, use.group.id][place][at]
        behavior_T = np.asarray(one.behavior_logprobs, np.float64)
        recorded_T = np.full_like(own_T, np.nan if use.recorded is None else use.recorded)
        found_5T = np.stack([own_T - behavior_T, after_T - own_T, earlier_T - behavior_T, lags_T, recorded_T])
        columns.append(found_5T[:, one.loss_mask & ~np.isnan(own_T)])
    tokens_5T = torch.from_numpy(np.concatenate(columns, 1))
    if use.recorded is not None and use.source == "fitted":
        tokens_5T[1] *= _fitted(tokens_5T[0], tokens_5T[1], use.recorded)
    return tokens_5T if use.source != "unknown" else tokens_5T.index_fill(0, torch.tensor([1]), torch.nan)


def _fitted(engine_T: Tensor, lag_T: Tensor, recorded: float) -> float:
    """Return the factor of `lag_T` with which mean (1 − ρ)₊ of the sum is the recorded one.

    >>> round(_fitted(torch.zeros(1), torch.tensor([-1.0]), recorded=0.25), 4)  # log 0.75
    0.2877
    """
    low, high = 0.0, FARTHEST
    for _ in range(40):
        middle = (low + high) / 2
        below = float(shortfall(engine_T + middle * lag_T).mean()) < recorded
        low, high = (middle, high) if below else (low, middle)
    return low


def _row(name: str, tokens_5T: Tensor) -> GapRow:
    engine_T, lag_T, _, _, recorded_T = tokens_5T
    known_T, recorded_T = ~lag_T.isnan(), recorded_T[~recorded_T.isnan()]
    whole_T = (engine_T + lag_T)[known_T]
    lagged = whole = None
    if len(whole_T):
        lagged = _part(lag_T[known_T], bounded_exp(whole_T) - bounded_exp(engine_T[known_T]))
        whole = _part(whole_T, bounded_exp(whole_T) - 1)
    recorded = float(recorded_T.mean()) if len(recorded_T) else None
    return GapRow(name, len(engine_T), _part(engine_T, bounded_exp(engine_T) - 1), lagged, whole, recorded)


def _part(log_ratios_T: Tensor, shift_T: Tensor) -> RatioPart:
    return RatioPart(*(float(one.mean()) for one in (log_ratios_T.abs(), shortfall(log_ratios_T), shift_T)))
