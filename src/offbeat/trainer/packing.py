"""Groups become micro-batches under a token budget.

A row is a prompt and completions of it, one after another:

    token_ids     p0 p1 p2 | a0 a1 | b0 b1 b2 | pad
    position_ids   0  1  2 |  3  4 |  3  4  5 |   0     each completion continues the prompt
    segment_ids    0  0  0 |  1  1 |  2  2  2 |  -1     a completion sees the prompt and itself
    predictors          p2   a0     p2  b0 b1           the last prompt token predicts every first token

With a shared prefix a row holds as many completions of its group as fit, so the prompt is computed once; otherwise it
holds one. Nothing else differs. A micro-batch is a rectangle of R rows padded to the longest, L, and R × L is what it
costs: never more than the budget. Rows of like length go together, the longest first.

Shapes: R rows, L tokens of the longest row, N completions, T tokens of the longest completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import PackingError
from offbeat.types import Group

PROMPT: Final = 0
PADDING: Final = -1


@dataclass(frozen=True)
class PackedRow:
    """Which completions of which group (by their place in the sequence given) stand in a row, and its length."""

    group: int
    completions: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class MicroBatchPlan:
    """The rows of a micro-batch, the longest first."""

    rows: tuple[PackedRow, ...]

    @property
    def cost(self) -> int:
        """R × L, padding included."""
        return len(self.rows) * self.rows[0].length

    @property
    def completions(self) -> tuple[tuple[int, int], ...]:
        """(group, completion) of each of the N completions, in the order of every array over N."""
        return tuple((row.group, completion) for row in self.rows for completion in row.completions)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The arrays of a plan."""

    plan: MicroBatchPlan
    token_ids_RL: NDArray[np.int64]
    position_ids_RL: NDArray[np.int64]
    segment_ids_RL: NDArray[np.int64]
    """0 on a prompt, 1, 2, … on the completions of a row, −1 on padding."""
    predictors: NDArray[np.int64]
    """For every completion token, the place in the flattened [R · L] hidden states that predicts it."""
    targets: NDArray[np.int64]
    """The completion tokens themselves, in the same order: completion after completion."""
    present_NT: NDArray[np.bool_]
    """Where tokens are in a padded [N, T]: `stream_NT[present_NT] = values` puts flat values in place."""

    def aligned(self, values: Sequence[NDArray[np.generic]], fill: float) -> NDArray[np.generic]:
        """One array per completion, in the plan's order, as a padded [N, T]."""
        flat = np.concatenate(values)
        stream_NT = np.full(self.present_NT.shape, fill, flat.dtype)
        stream_NT[self.present_NT] = flat
        return stream_NT


def plan(groups: Sequence[Group], token_budget: int, *, shared_prefix: bool) -> tuple[MicroBatchPlan, ...]:
    """Every completion of `groups` exactly once, in micro-batches that cost at most `token_budget` each.

    The same groups give the same plan, on every machine. A group too long for one row with a shared prefix is spread
    over several, each with the prompt.

    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answers = tuple(Completion(f"g/{i}", [5] * n, UNKNOWN) for i, n in enumerate([2, 3, 2]))
    >>> group = Group("g", Prompt("p", [1, 2, 3], "arithmetic"), answers)
    >>> [part.rows for part in plan([group], 10, shared_prefix=True)]
    [(PackedRow(group=0, completions=(0, 1, 2), length=10),)]
    >>> [part.cost for part in plan([group], 10, shared_prefix=False)]
    [6, 10]
    """
    rows = [row for place, group in enumerate(groups) for row in _rows(place, group, token_budget, shared_prefix)]
    rows.sort(key=lambda row: (-row.length, row.group, row.completions))
    plans: list[MicroBatchPlan] = []
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * rows[start].length > token_budget:
            plans.append(MicroBatchPlan(tuple(rows[start:end])))
            start = end
    return tuple(plans)


def lay_out(part: MicroBatchPlan, groups: Sequence[Group]) -> MicroBatch:
    """The arrays of one micro-batch; `groups` are those the plan was made from.

    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answers = (Completion("g/0", [7, 8], UNKNOWN), Completion("g/1", [9], UNKNOWN))
    >>> group = Group("g", Prompt("p", [1, 2, 3], "arithmetic"), answers)
    >>> batch = lay_out(plan([group], 64, shared_prefix=True)[0], [group])
    >>> batch.token_ids_RL.tolist(), batch.position_ids_RL.tolist(), batch.segment_ids_RL.tolist()
    ([[1, 2, 3, 7, 8, 9]], [[0, 1, 2, 3, 4, 3]], [[0, 0, 0, 1, 1, 2]])
    >>> batch.predictors.tolist(), batch.targets.tolist(), batch.present_NT.tolist()
    ([2, 3, 2], [7, 8, 9], [[True, True], [True, False]])
    """
    shape = (len(part.rows), part.rows[0].length)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segment_ids = np.full(shape, PADDING, np.int64)
    predictors: list[NDArray[np.int64]] = []
    answers: list[NDArray[np.int32]] = []
    for r, row in enumerate(part.rows):
        prompt = groups[row.group].prompt.token_ids
        end = len(prompt)
        token_ids[r, :end], position_ids[r, :end], segment_ids[r, :end] = prompt, np.arange(end), PROMPT
        for segment, completion in enumerate(row.completions, start=1):
            answer = groups[row.group].completions[completion].token_ids
            start, end = end, end + len(answer)
            token_ids[r, start:end] = answer
            position_ids[r, start:end] = len(prompt) + np.arange(len(answer))
            segment_ids[r, start:end] = segment
            before = np.arange(start - 1, end - 1)
            before[:1] = len(prompt) - 1
            predictors.append(r * shape[1] + before)
            answers.append(answer)
    lengths = np.array([len(answer) for answer in answers])
    present = np.arange(lengths.max()) < lengths[:, None]
    targets = np.concatenate(answers).astype(np.int64)
    return MicroBatch(part, token_ids, position_ids, segment_ids, np.concatenate(predictors), targets, present)


def attention(segment_ids_RL: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[R, L, L]: which keys (last axis) a query may look at. Padding sees itself, so that no query sees nothing.

    >>> attention(np.array([[0, 1, 2, -1]]))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
    """
    length = segment_ids_RL.shape[1]
    query, key = segment_ids_RL[:, :, None], segment_ids_RL[:, None, :]
    causal = np.tri(length, dtype=np.bool_)
    within = (key == PROMPT) | (key == query)
    visible: NDArray[np.bool_] = causal & within & (query != PADDING) & (key != PADDING)
    return visible | np.eye(length, dtype=np.bool_)


def _rows(place: int, group: Group, token_budget: int, shared_prefix: bool) -> Iterator[PackedRow]:
    prompt = len(group.prompt.token_ids)
    if prompt == 0:
        raise PackingError(f"group {group.id!r} has an empty prompt: no state predicts a first token; leave it out")
    members: list[int] = []
    length = prompt
    for i, completion in enumerate(group.completions):
        size = len(completion.token_ids)
        if prompt + size > token_budget:
            raise PackingError(
                f"completion {completion.id!r} of group {group.id!r} has {prompt} prompt and {size} completion tokens, "
                f"more than the token budget of {token_budget}; raise the budget to at least {prompt + size}"
            )
        if members and (not shared_prefix or length + size > token_budget):
            yield PackedRow(place, tuple(members), length)
            members, length = [], prompt
        members.append(i)
        length += size
    if members:
        yield PackedRow(place, tuple(members), length)
