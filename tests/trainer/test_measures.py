"""Drift, gates and the bound match hand-computed numbers, for any cut into micro-batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import a_llama, a_trainer, close_to, some_groups

from offbeat.objective.measures import ForwardPass
from offbeat.objective.spec import Objective
from offbeat.trainer.batch import assemble_batch, build_micro_batch, plan_micro_batches, to_tensors
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.measures import Measures, _credit_figures, measure
from offbeat.trainer.trainer import Trained
from offbeat.types import (
    UNKNOWN,
    Completion,
    Finish,
    Group,
    GroupDrift,
    Prompt,
    PublishedDrift,
    Score,
    StepContext,
    VersionSpan,
)

CPU = torch.device("cpu")


def a_pair(name: str, version: int | None, ratios: list[list[float]]) -> Group:
    """A right and a wrong answer of two tokens; behavior log-probs are −1, so that π_k/α will be `ratios`."""
    spans = () if version is None else (VersionSpan(version, 0, 2),)
    answers = tuple(
        Completion(f"{name}/{i}", [3, 4], [-1.0, -1.0], spans, score=Score(float(i == 0))) for i in range(len(ratios))
    )
    return Group(name, Prompt("p", [1], "t"), answers)


def measured(
    groups: list[Group],
    ratios: list[list[list[float]]],
    *,
    later: float = 1.0,
    step: int = 10,
    gated: bool = True,
    passed: bool = True,
    updates: int = 2,
    first_passed: list[list[bool]] | None = None,
    context: StepContext | None = None,
) -> Measures:
    """Measure one micro-batch and two updates. The second multiplies ratios by `later` and the gate by `passed`.

    The gate of the first update lets every group's completions through as `first_passed` says.
    """
    batch = assemble_batch(groups, Objective(), step=step, context=context)
    [plan] = plan_micro_batches(batch.trimmed, 999, shared_prefix=True)
    part = to_tensors(batch, build_micro_batch(plan, batch.trimmed), counted=True, device=CPU)
    values = torch.tensor([ratios[g][c] for g, c in plan.completions])
    first, second = (-1 + (values * factor).log() for factor in (1.0, later))
    entropies = torch.full_like(first, 0.7)
    opened = torch.tensor([first_passed[c] for _, c in plan.completions]) if first_passed else part.mask_NT
    part.passes += [
        ForwardPass(first, entropies, part.mask_NT & opened),
        ForwardPass(second, entropies, part.mask_NT & passed),
    ][:updates]
    return measure(batch, [part], gated=gated, ranks=Ranks())


class TestByHand:
    RATIOS = ((1.5, 1.0), (0.5, 1.0))

    def of(self, version: int | None = 10, **arguments: object) -> Measures:
        ratios = [list(row) for row in self.RATIOS]
        return measured([a_pair("g", version, ratios)], [ratios], **arguments)  # type: ignore[arg-type]

    def test_tails_are_tokens_ten_times_more_or_less_likely(self) -> None:
        ratios = [[[11.0, 1.0], [0.09, 9.0]]]
        figures = measured([a_pair("g", 10, ratios[0])], ratios).overall
        assert figures["ratio_tail_share"] == pytest.approx(0.5)
        assert figures["unscorable_share"] == 0.0

    def test_length_and_truncation_count_every_completion(self) -> None:
        pair = a_pair("g", 10, [[1.0, 1.0]] * 2)
        cut = replace(pair.completions[0], token_ids=np.array([3, 4, 5, 6]), finish=Finish.LENGTH)
        batch = assemble_batch([Group("h", pair.prompt, (cut, *pair.completions[1:])), pair], Objective(), step=10)
        figures = _credit_figures(batch)
        assert figures["completion_length"] == (4 + 2 + 2 + 2) / 4 and figures["truncated_share"] == 1 / 4

    def test_drift_per_token_and_per_sequence(self) -> None:
        figures = self.of().overall
        assert figures["drift_tv_token"] == pytest.approx(0.5 * (0.5 + 0 + 0.5 + 0) / 4)
        assert figures["drift_tv_sequence"] == pytest.approx(0.5 * (0.5 + 0.5) / 2)
        kl = (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))
        assert figures["drift_kl_token"] == pytest.approx(kl / 4, rel=1e-5)
        assert figures["ess"] == pytest.approx((1.5 + 0.5) ** 2 / (2 * (1.5**2 + 0.5**2)))

    def test_predicted_gain_and_bounds_look_at_the_last_update(self) -> None:
        figures = self.of(later=1.1).overall
        right, wrong = 1.5 * 1.21, 0.5 * 1.21
        assert figures["predicted_gain_plain"] == pytest.approx(2 * (right * 0.5 - wrong * 0.5) / 2, rel=1e-5)
        assert figures["predicted_gain"] == pytest.approx(2 * (right / (right + wrong) - 0.5), rel=1e-5)
        sigma = math.sqrt(0.25 + 1e-4)
        surrogate = (right - wrong) * 0.5 / sigma / 2
        tv_policy, tv_proximal = (1 - wrong) / 2, 0.5 / 2
        penalty = (1 - sigma) / sigma * tv_policy + tv_proximal
        assert figures["bound_tight"] == pytest.approx(surrogate - penalty, rel=1e-4)
        assert figures["bound_paper"] == pytest.approx(surrogate - 2 * penalty, rel=1e-4)

    def test_with_one_update_there_is_no_bound_because_it_could_promise_nothing(self) -> None:
        assert not {"bound_paper", "bound_tight"} & self.of(updates=1).overall.keys()

    def test_groups_without_contrast_count_in_the_predicted_gain(self) -> None:
        """Two groups of eight have contrast: 0.0252 and not 0.1007, as the mean over those two alone would be."""
        ratios = [[1.2, 1.0], [1.0, 1.0]]
        moved = [a_pair(f"g{i}", 10, ratios) for i in range(2)]
        still = [equal(a_pair(f"s{i}", 10, ratios)) for i in range(6)]
        alone, together = (measured(groups, [ratios] * 2).overall for groups in (moved, [*moved, *still]))
        assert together["predicted_gain"] == pytest.approx(alone["predicted_gain"] / 4, rel=1e-6)
        assert together["predicted_gain_plain"] == pytest.approx(alone["predicted_gain_plain"] / 4, rel=1e-6)

    def test_gates_count_updates_by_sign(self) -> None:
        figures = self.of(passed=False).overall
        assert figures["gate_stopped_up"] == figures["gate_stopped_down"] == 0.5  # passed in one update of two

    def test_a_stopped_token_counts_by_its_gradient_and_not_by_its_number(self) -> None:
        """π is e⁻¹ times the ratio. The certain token has no gradient, so stopping it stops nothing."""
        certain, unlikely = math.e, 0.5
        ratios = [[certain, unlikely], [certain, unlikely]]
        lost = {}
        for name, gate in {"certain": [[False, True]] * 2, "unlikely": [[True, False]] * 2}.items():
            figures = measured([a_pair("g", 10, ratios)], [ratios], first_passed=gate, updates=1).overall
            lost[name] = figures["gate_stopped_gradient"]
            assert figures["gate_stopped_up"] == figures["gate_stopped_down"] == 0.5
        assert lost["certain"] == pytest.approx(0, abs=1e-6) and lost["unlikely"] == pytest.approx(1, abs=1e-6)

    def test_figures_without_data_are_left_out(self) -> None:
        figures = self.of(gated=False).overall
        assert "gate_stopped_up" not in figures and "reference_kl" not in figures

    def test_the_engine_gap_covers_only_lag_0(self) -> None:
        assert self.of(version=10).overall["engine_gap"] == pytest.approx(
            (abs(math.log(1.5)) + abs(math.log(0.5))) / 4, rel=1e-5
        )
        assert "engine_gap" not in self.of(version=9).overall

    def test_entropy_rewards_and_shares(self) -> None:
        figures = self.of().overall
        assert figures["entropy"] == pytest.approx(0.7)
        assert figures["reward_mean"] == 0.5
        assert figures["trained_tokens"] == 4
        assert figures["zero_variance_share"] == figures["too_small_share"] == 0


class TestByLag:
    def test_tokens_and_groups_fall_into_the_bucket_of_their_lag(self) -> None:
        still, far = [[1.0, 1.0], [1.0, 1.0]], [[0.4, 1.0], [1.0, 1.0]]
        found = measured([a_pair("a", 10, still), a_pair("b", 4, far), a_pair("c", None, still)], [still, far, still])
        assert list(found.by_lag) == ["0", "4-7", "none"]
        assert found.by_lag["0"]["drift_tv_token"] == 0 and found.by_lag["0"]["ess"] == 1
        assert found.by_lag["4-7"]["drift_tv_token"] == pytest.approx((1 - 0.4) / 4)
        assert found.by_lag["4-7"]["lag"] == 6
        assert found.by_lag["4-7"]["ess"] == pytest.approx(1.4**2 / (2 * 1.16))
        assert "lag" not in found.by_lag["none"]
        assert found.overall["lag"] == 3

    def test_a_completion_written_by_two_versions_is_split_between_buckets(self) -> None:
        ratios = [[1.0, 1.0], [1.0, 1.0]]
        group = a_pair("g", 10, ratios)
        spans = (VersionSpan(2, 0, 1), VersionSpan(10, 1, 2))
        group = replace(group, completions=tuple(replace(c, versions=spans) for c in group.completions))
        found = measured([group], [ratios])
        assert list(found.by_lag) == ["0", "8-15"] and found.overall["lag"] == 4
        assert "ess" not in found.by_lag["0"] and found.by_lag["8-15"]["ess"] == 1  # a group has one lag, its largest

    def test_a_version_that_the_trainer_has_not_reached_has_no_lag(self) -> None:
        ratios = [[1.0, 1.0], [1.0, 1.0]]
        assert list(measured([a_pair("g", 11, ratios)], [ratios]).by_lag) == ["none"]


def test_answers_without_log_probs_do_not_count_in_drift() -> None:
    ratios = [[0.5, 1.0], [1.0, 1.0], [0.1, 0.1]]
    group = a_pair("g", 10, ratios)
    foreign = replace(group.completions[2], behavior_logprobs=UNKNOWN, versions=(), source="human")
    found = measured([replace(group, completions=(*group.completions[:2], foreign))], [ratios])
    assert found.overall["drift_tv_token"] == pytest.approx(0.5 / 4)
    assert found.overall["drift_tv_sequence"] == pytest.approx(0.5 / 2)
    assert found.overall["trained_tokens"] == 6


def equal(group: Group) -> Group:
    return replace(group, completions=tuple(replace(one, score=Score(1.0)) for one in group.completions))


class TestDriftFromTheVersionPublishedLast:
    NEAR, FAR = ((0.9, 1.0), (1.0, 1.1)), ((0.1, 0.2), (0.3, 0.1))

    def of(self, groups: list[Group], ratios: list, **context: object) -> PublishedDrift:
        return measured(groups, ratios, context=StepContext(**context)).published  # type: ignore[arg-type]

    def test_counts_only_tokens_that_this_version_wrote(self) -> None:
        alone = self.of([a_pair("a", 8, self.NEAR)], [self.NEAR], published=8)
        assert alone.tokens == 4 and alone.tv == pytest.approx(0.1 / 4, rel=1e-5)
        for version in (None, 3, 9):
            other = a_pair("b", version, self.FAR)
            mixed = self.of([a_pair("a", 8, self.NEAR), other], [self.NEAR, self.FAR], published=8)
            assert mixed.tokens == 4 and abs(mixed.tv - alone.tv) < 1e-12, version

    def test_does_not_count_replayed_groups(self) -> None:
        groups, ratios = [a_pair("a", 8, self.NEAR), a_pair("b", 8, self.FAR)], [self.NEAR, self.FAR]
        alone = self.of(groups[:1], ratios[:1], published=8)
        mixed = self.of(groups, ratios, published=8, replayed=frozenset({"b"}))
        assert (mixed.tokens, mixed.tv) == (alone.tokens, alone.tv)

    def test_a_completion_of_two_versions_counts_with_the_tokens_of_the_last(self) -> None:
        group = a_pair("g", 8, self.FAR)
        spans = (VersionSpan(2, 0, 1), VersionSpan(8, 1, 2))
        group = replace(group, completions=tuple(replace(c, versions=spans) for c in group.completions))
        found = self.of([group], [self.FAR], published=8)
        assert found.tokens == 2 and found.tv == pytest.approx((0.8 + 0.9) / 2, rel=1e-5)

    def test_is_unknown_without_tokens_of_this_version(self) -> None:
        found = measured([a_pair("a", 3, self.FAR)], [self.FAR], context=StepContext(published=8))
        assert found.published == PublishedDrift(0, 0.0, 0.0) and "drift_published" not in found.overall

    def test_wasted_is_the_stopped_share_of_what_moved_along_its_advantage(self) -> None:
        # The right answer moved up and the wrong one down, except for one token that moved against its advantage.
        ratios = [[1.5, 0.9], [0.5, 1.0]]
        group = a_pair("a", 8, ratios)
        gate = [[False, True], [True, True]]
        found = measured([group], [ratios], first_passed=gate, context=StepContext(published=8)).published
        assert found.wasted == pytest.approx(0.5), "one of the two tokens that moved along is stopped"
        later = measured([group], [ratios], passed=False, context=StepContext(published=8)).published
        assert later.wasted == 0, "what a later update stops is not due to lag"
        half = measured(
            [group, a_pair("b", 8, ratios)],
            [ratios, ratios],
            first_passed=gate,
            context=StepContext(published=8, replayed=frozenset({"b"})),
        )
        assert half.published.wasted == pytest.approx(0.25), "half of the batch's gradient is replayed"


def test_each_group_has_its_own_drift_and_effective_sample_size() -> None:
    near, far = [[1.0, 1.0], [1.0, 1.0]], [[0.5, 1.0], [1.0, 1.0]]
    found = measured([a_pair("a", 8, near), a_pair("b", None, far)], [near, far]).groups
    assert found["a"] == GroupDrift(0.0, 1.0)
    assert found["b"].tv == pytest.approx(0.5 / 4) and found["b"].ess == pytest.approx(1.5**2 / (2 * 1.25))


@pytest.mark.parametrize("budget", [24, 40, 999])
def test_figures_do_not_depend_on_micro_batches(budget: int) -> None:
    groups = close_to(PolicyModel(a_llama()), some_groups(7, count=4), spread=0.2)
    whole, cut = (a_trainer(Objective(), token_budget=b).train(groups) for b in (999, budget))
    assert isinstance(whole, Trained) and isinstance(cut, Trained)
    assert all(0 < one.metrics.pop("drift_step") < 0.5 for one in (whole, cut)), "of the rows of one micro-batch"
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-7)
    for bucket, figures in whole.by_lag.items():
        assert cut.by_lag[bucket] == pytest.approx(figures, rel=1e-5, abs=1e-7)


def test_on_its_own_samples_a_policy_has_no_drift_and_only_a_rounding_gap() -> None:
    groups = close_to(PolicyModel(a_llama()), some_groups(7), spread=0.0)
    fresh = [replace(g, completions=tuple(fresh_version(c) for c in g.completions)) for g in groups]
    done = a_trainer(Objective()).train(fresh)
    assert isinstance(done, Trained)
    assert done.metrics["engine_gap"] < 1e-5 and done.metrics["drift_tv_token"] < 1e-5
    assert done.metrics["ess"] == pytest.approx(1)


def fresh_version(completion: Completion) -> Completion:
    return replace(completion, versions=(VersionSpan(0, 0, len(completion.token_ids)),))


def test_extreme_ratios_stay_finite() -> None:
    groups = [
        replace(
            g,
            completions=tuple(
                replace(c, behavior_logprobs=np.linspace(-1e4, 1e4, len(c.token_ids))) for c in g.completions
            ),
        )
        for g in some_groups(7)
    ]
    done = a_trainer(Objective()).train(groups)
    assert isinstance(done, Trained) and all(math.isfinite(value) for value in done.metrics.values())
