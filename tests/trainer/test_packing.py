"""Micro-batches stay within the budget and give every completion its own context."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import visible_keys

from offbeat.errors import PackingError
from offbeat.trainer.batch import PADDING, PROMPT, build_micro_batch, plan_micro_batches
from offbeat.types import UNKNOWN, Completion, Group, Prompt


def a_group(name: str, prompt: int, sizes: list[int]) -> Group:
    """A group whose token ids encode where they belong, so that a misplaced one is detected."""
    mark = 1000 * (1 + sum(name.encode()))
    answers = tuple(
        Completion(f"{name}/{i}", mark + 100 * (i + 1) + np.arange(size), UNKNOWN) for i, size in enumerate(sizes)
    )
    return Group(name, Prompt(f"prompt of {name}", mark + np.arange(prompt), "arithmetic"), answers)


groups_strategy = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)), max_size=8
).map(lambda shapes: [a_group(f"g{i}", prompt, sizes) for i, (prompt, sizes) in enumerate(shapes)])
budgets = st.integers(50, 300)


class TestPlan:
    @settings(max_examples=300, deadline=None)
    @given(groups_strategy, budgets, st.booleans())
    def test_holds_every_completion_exactly_once_and_never_exceeds_the_budget(self, groups, budget, shared):
        plans = plan_micro_batches(groups, budget, shared_prefix=shared)
        held = Counter(pair for part in plans for pair in part.completions)
        assert held == Counter({(g, c): 1 for g, group in enumerate(groups) for c in range(len(group.completions))})
        assert all(0 < part.cost <= budget for part in plans)
        for row in (row for part in plans for row in part.rows):
            group = groups[row.group]
            answers = sum(len(group.completions[c].token_ids) for c in row.completions)
            assert row.length == len(group.prompt.token_ids) + answers

    @settings(max_examples=200, deadline=None)
    @given(groups_strategy, budgets, st.booleans())
    def test_puts_like_lengths_together_and_the_longest_first(self, groups, budget, shared):
        plans = plan_micro_batches(groups, budget, shared_prefix=shared)
        lengths = [row.length for part in plans for row in part.rows]
        assert lengths == sorted(lengths, reverse=True)
        for part, following in itertools.pairwise(plans):
            # A micro-batch ends only where one more row would not have fitted.
            assert (len(part.rows) + 1) * part.rows[0].length > budget
            assert following.rows[0].length <= part.rows[-1].length

    @settings(max_examples=200, deadline=None)
    @given(groups_strategy, budgets, st.booleans())
    def test_depends_on_lengths_alone(self, groups, budget, shared):
        lookalikes = [
            a_group(f"another {i}", len(g.prompt.token_ids), [len(c.token_ids) for c in g.completions])
            for i, g in enumerate(groups)
        ]
        assert plan_micro_batches(groups, budget, shared_prefix=shared) == plan_micro_batches(
            lookalikes, budget, shared_prefix=shared
        )

    @settings(max_examples=200, deadline=None)
    @given(groups_strategy)
    def test_computes_each_prompt_once_where_a_group_fits_a_row(self, groups):
        plans = plan_micro_batches(groups, 10_000, shared_prefix=True)
        assert Counter(row.group for part in plans for row in part.rows) == Counter(range(len(groups)))

    def test_spreads_a_group_too_long_for_one_row_over_several(self):
        rows = [
            row
            for part in plan_micro_batches([a_group("g", 10, [20, 20, 20])], 55, shared_prefix=True)
            for row in part.rows
        ]
        assert [(row.completions, row.length) for row in rows] == [((0, 1), 50), ((2,), 30)]

    def test_counts_padding_as_cost(self):
        parts = plan_micro_batches([a_group("g", 1, [9, 4, 4])], 20, shared_prefix=False)
        assert [(len(part.rows), part.cost) for part in parts] == [(2, 20), (1, 5)]

    @pytest.mark.parametrize("shared", [True, False])
    def test_names_the_completion_that_fits_nowhere_and_the_budget_it_needs(self, shared: bool):
        with pytest.raises(PackingError, match=r"'g/1' of group 'g' has 10 prompt and 31 .* at least 41"):
            plan_micro_batches([a_group("g", 10, [5, 31])], 40, shared_prefix=shared)

    def test_refuses_an_empty_prompt_because_nothing_predicts_the_first_token(self):
        with pytest.raises(PackingError, match="group 'g' has an empty prompt"):
            plan_micro_batches([a_group("g", 0, [5])], 40, shared_prefix=True)


class TestLayout:
    @settings(max_examples=300, deadline=None)
    @given(groups_strategy, budgets, st.booleans())
    def test_gives_each_completion_the_context_it_was_written_in(self, groups, budget, shared):
        for part in plan_micro_batches(groups, budget, shared_prefix=shared):
            batch = build_micro_batch(part, groups)
            assert batch.token_ids_RL.size == part.cost
            visible = visible_keys(batch.segment_ids_RL)
            flat = iter(zip(batch.predictors, batch.targets, strict=True))
            length = batch.token_ids_RL.shape[1]
            for g, c in part.completions:
                prompt, answer = groups[g].prompt.token_ids, groups[g].completions[c].token_ids
                for t, token in enumerate(answer):
                    predictor, target = next(flat)
                    row, column = divmod(int(predictor), length)
                    assert target == token
                    # What the predicting state sees, in the order of positions, is the prompt and the answer so far.
                    seen = np.flatnonzero(visible[row, column])
                    order = seen[np.argsort(batch.position_ids_RL[row, seen])]
                    assert batch.position_ids_RL[row, order].tolist() == list(range(len(prompt) + t))
                    assert batch.token_ids_RL[row, order].tolist() == [*prompt, *answer[:t]]
            assert next(flat, None) is None

    @settings(max_examples=200, deadline=None)
    @given(groups_strategy, budgets, st.booleans())
    def test_puts_streams_in_place_completion_by_completion(self, groups, budget, shared):
        for part in plan_micro_batches(groups, budget, shared_prefix=shared):
            batch = build_micro_batch(part, groups)
            answers = [groups[g].completions[c].token_ids for g, c in part.completions]
            stream_NT = batch.pad(answers, fill=-7)
            for line, answer in zip(stream_NT, answers, strict=True):
                assert line[: len(answer)].tolist() == answer.tolist()
                assert (line[len(answer) :] == -7).all()
            assert batch.targets.tolist() == stream_NT[batch.present_NT].tolist()

    def test_is_as_drawn_at_the_top_of_the_module(self):
        group = Group(
            "g",
            Prompt("p", [1, 2, 3], "arithmetic"),
            (Completion("g/0", [4, 5], UNKNOWN), Completion("g/1", [6, 7, 8], UNKNOWN)),
        )
        longer = a_group("h", 3, [6])
        batch = build_micro_batch(plan_micro_batches([group, longer], 64, shared_prefix=True)[0], [group, longer])
        assert batch.plan.completions == ((1, 0), (0, 0), (0, 1))
        assert batch.position_ids_RL[1].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0]
        assert batch.segment_ids_RL[1].tolist() == [PROMPT, PROMPT, PROMPT, 1, 1, 2, 2, 2, PADDING]
        assert (batch.predictors[6:] - 9).tolist() == [2, 3, 2, 5, 6]
