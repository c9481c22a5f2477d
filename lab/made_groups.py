"""Groups made up for benchmarks and tests: valid ones by number, and broken ones with the reason to refuse them for."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from offbeat.experience.door import Reason, Rules
from offbeat.types import UNKNOWN, Completion, Finish, Group, Prompt, Score, Unscorable, VersionSpan

VOCABULARY: Final = 50_000
RULES: Final = Rules(
    vocab_size=VOCABULARY,
    reward_ranges={"arithmetic": (0.0, 1.0)},
    max_completions=32,
    max_tokens=2_048,
    max_text=4_096,
)


def made(number: int, *, prefix: str = "g", size: int = 8, tokens: int = 16) -> Group:
    """The group of that number: the same each time, different from every other.

    >>> made(7) == made(7), made(7).id, made(7).oldest_version
    (True, 'g7', 0)
    """
    rng = np.random.default_rng(number)
    name = f"{prefix}{number}"
    version = number // 64
    completions = tuple(
        Completion(
            id=f"{name}/{i}",
            token_ids=rng.integers(0, VOCABULARY, tokens, dtype=np.int32),
            behavior_logprobs=-rng.random(tokens, dtype=np.float32),
            versions=(VersionSpan(version, 0, tokens),),
            score=Score(float(rng.integers(2)), {"correct": 1.0}),
        )
        for i in range(size)
    )
    prompt = Prompt(f"p{number}", rng.integers(0, VOCABULARY, 16, dtype=np.int32), "arithmetic", {"answer": number})
    return Group(name, prompt, completions)


def unscored(group: Group) -> Group:
    """The group as it is before feedback."""
    return replace(group, completions=tuple(replace(c, score=None) for c in group.completions))


_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def completions(draw: st.DrawFn, id_: str) -> Completion:
    """Any completion the door must let in."""
    length = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    own = draw(st.booleans())
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=2))) if length > 1 else []
    edges = [0, *cuts, length]
    spans = tuple(VersionSpan(draw(st.integers(0, 99)), a, b) for a, b in pairwise(edges))
    known = draw(st.booleans())
    score = draw(
        st.none()
        | st.builds(Score, st.floats(0, 1), st.dictionaries(_TEXTS, st.floats(-1, 1), max_size=2))
        | st.builds(Unscorable, st.sampled_from(["timeout", "crash", "sandbox", "invalid"]), _TEXTS | st.just(""))
    )
    return Completion(
        id=id_,
        token_ids=rng.integers(0, VOCABULARY, length, dtype=np.int32),
        behavior_logprobs=-rng.random(length, dtype=np.float32) if known else UNKNOWN,
        versions=spans if own else (),
        loss_mask=rng.random(length) < 0.7 if draw(st.booleans()) else None,  # type: ignore[arg-type]
        finish=draw(st.sampled_from(Finish)),
        source="policy" if own else draw(_TEXTS.filter(lambda text: text != "policy")),
        score=score,
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Any group the door must let in."""
    name = draw(_TEXTS)
    prompt = Prompt(
        id=draw(_TEXTS),
        token_ids=draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)),  # type: ignore[arg-type]
        task=draw(st.sampled_from(["arithmetic", "code", "it's"])),
        columns=draw(st.dictionaries(_TEXTS, _JSON, max_size=3)),
    )
    size = draw(st.integers(1, 4))
    return Group(name, prompt, tuple(draw(completions(f"{name}/{i}")) for i in range(size)))


Change = Callable[[Group, np.random.Generator], object]


def _prompt(**changes: Any) -> Change:
    return lambda group, _: replace(group, prompt=replace(group.prompt, **changes))


def _one(change: Callable[[Completion, np.random.Generator], Completion]) -> Change:
    """Break one completion, any of them."""

    def broken(group: Group, rng: np.random.Generator) -> Group:
        at = int(rng.integers(len(group.completions)))
        parts = list(group.completions)
        parts[at] = change(parts[at], rng)
        return replace(group, completions=tuple(parts))

    return broken


def _with(**changes: Any) -> Change:
    return _one(lambda completion, _: replace(completion, **changes))


def _logprob(value: float) -> Change:
    def change(completion: Completion, rng: np.random.Generator) -> Completion:
        values = np.full(len(completion.token_ids), -0.5, np.float32)
        values[rng.integers(len(values))] = value
        return replace(completion, behavior_logprobs=values)

    return _one(change)


def _token(value: int) -> Change:
    def change(completion: Completion, rng: np.random.Generator) -> Completion:
        tokens = completion.token_ids.copy()
        tokens[rng.integers(len(tokens))] = value
        return replace(completion, token_ids=tokens)

    return _one(change)


def _spans(change: Callable[[int], tuple[object, ...]]) -> Change:
    return _one(lambda c, _: replace(c, source="policy", versions=change(len(c.token_ids))))  # type: ignore[arg-type]


def _reward(value: Any) -> Change:
    return _with(score=Score(value))


BREAKAGES: Final[dict[str, tuple[Reason, Change]]] = {
    "a dict": (Reason.NOT_A_GROUP, lambda group, _: {"id": group.id}),
    "nothing": (Reason.NOT_A_GROUP, lambda group, _: None),
    "a dict as prompt": (Reason.NOT_A_GROUP, lambda group, _: replace(group, prompt={"id": "p"})),  # type: ignore[arg-type]
    "a text as completion": (Reason.NOT_A_GROUP, lambda group, _: replace(group, completions=("42",))),  # type: ignore[arg-type]
    "no id": (Reason.ID, lambda group, _: replace(group, id="")),
    "a number as id": (Reason.ID, lambda group, _: replace(group, id=7)),  # type: ignore[arg-type]
    "half a character as id": (Reason.ID, lambda group, _: replace(group, id="g\ud800")),
    "blank prompt id": (Reason.ID, _prompt(id="  ")),
    "no completion id": (Reason.ID, _with(id="")),
    "one completion twice": (Reason.ID, lambda group, _: replace(group, completions=group.completions[:1] * 2)),
    "no task": (Reason.TASK, _prompt(task="")),
    "half a character as task": (Reason.TASK, _prompt(task="\ud800")),
    "no prompt tokens": (Reason.PROMPT_TOKENS, _prompt(token_ids=[])),
    "square prompt tokens": (Reason.PROMPT_TOKENS, _prompt(token_ids=[[1, 2], [3, 4]])),
    "NaN in columns": (Reason.PROMPT_COLUMNS, _prompt(columns={"answer": float("nan")})),
    "an object in columns": (Reason.PROMPT_COLUMNS, _prompt(columns={"answer": object()})),
    "a list as columns": (Reason.PROMPT_COLUMNS, _prompt(columns=["answer"])),
    "a tuple in columns": (Reason.PROMPT_COLUMNS, _prompt(columns={"answer": (1, 2)})),
    "half a character in columns": (Reason.PROMPT_COLUMNS, _prompt(columns={"answer": "\ud800"})),
    "a foreign prompt token": (Reason.VOCABULARY, _prompt(token_ids=[VOCABULARY])),
    "no completions": (Reason.NO_COMPLETIONS, lambda group, _: replace(group, completions=())),
    "an empty completion": (Reason.TOKENS, _with(token_ids=[], loss_mask=None)),
    "square tokens": (Reason.TOKENS, _with(token_ids=[[1, 2]], loss_mask=None)),
    "a negative token": (Reason.VOCABULARY, _token(-1)),
    "a foreign token": (Reason.VOCABULARY, _token(VOCABULARY)),
    "a log-prob too many": (
        Reason.LOGPROBS_LENGTH,
        _one(lambda c, _: replace(c, behavior_logprobs=np.zeros(len(c.token_ids) + 1, np.float32))),
    ),
    "square log-probs": (Reason.LOGPROBS_LENGTH, _with(behavior_logprobs=[[-0.5]])),
    "a NaN log-prob": (Reason.LOGPROBS, _logprob(float("nan"))),
    "a log-prob of minus infinity": (Reason.LOGPROBS, _logprob(float("-inf"))),
    "a positive log-prob": (Reason.LOGPROBS, _logprob(1e-3)),
    "a short loss mask": (Reason.LOSS_MASK, _with(loss_mask=[])),
    "spans that end early": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(1, 0, n + 1),))),
    "spans with a gap": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(1, 1, n + 1),))),
    "spans that overlap": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(1, 0, n), VersionSpan(2, 0, n)))),
    "an empty span": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(1, 0, 0), VersionSpan(1, 0, n)))),
    "a negative version": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(-1, 0, n),))),
    "a huge version": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(2**31, 0, n),))),
    "a truth value as version": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(True, 0, n),))),
    "half a version": (Reason.VERSIONS, _spans(lambda n: (VersionSpan(1.5, 0, n),))),  # type: ignore[arg-type]
    "no version": (Reason.VERSIONS, _spans(lambda n: ())),
    "a tuple as span": (Reason.VERSIONS, _spans(lambda n: ((1, 0, n),))),
    "an unknown finish": (Reason.FINISH, _with(finish="tired")),
    "no source": (Reason.SOURCE, _with(source="")),
    "half a character as source": (Reason.SOURCE, _with(source="model\ud800")),
    "half a character as detail": (Reason.SCORE, _with(score=Unscorable("crash", "\ud800"))),
    "a number as detail": (Reason.SCORE, _with(score=Unscorable("crash", 7))),  # type: ignore[arg-type]
    "half a character in a part's name": (Reason.REWARD, _with(score=Score(1.0, {"\ud800": 1.0}))),
    "a bare number as score": (Reason.SCORE, _with(score=1.0)),
    "an unknown reason": (Reason.SCORE, _with(score=Unscorable("tired"))),  # type: ignore[arg-type]
    "a NaN reward": (Reason.REWARD, _reward(float("nan"))),
    "an infinite reward": (Reason.REWARD, _reward(float("inf"))),
    "a reward that no float can hold": (Reason.REWARD, _reward(10**400)),
    "a text as reward": (Reason.REWARD, _reward("1.0")),
    "a NaN part": (Reason.REWARD, _with(score=Score(1.0, {"correct": float("nan")}))),
    "a list as breakdown": (Reason.REWARD, _with(score=Score(1.0, [1.0]))),  # type: ignore[arg-type]
    "a reward out of range": (
        Reason.REWARD_RANGE,
        lambda group, rng: _reward(1.5)(replace(group, prompt=replace(group.prompt, task="arithmetic")), rng),
    ),
    "too many completions": (
        Reason.SIZE,
        lambda group, _: replace(
            group, completions=tuple(replace(group.completions[0], id=f"c{i}") for i in range(33))
        ),
    ),
    "too many tokens": (Reason.SIZE, _with(token_ids=[1] * 2_049, loss_mask=None)),
    "too long an id": (Reason.SIZE, lambda group, _: replace(group, id="g" * 5_000)),
    "too much text": (Reason.SIZE, _prompt(columns={"text": "x" * 5_000})),
}
"""What can be wrong with a group, and the reason the door must give."""


@st.composite
def malformed(draw: st.DrawFn) -> tuple[object, Reason, str]:
    """A valid group with one thing broken, the reason it must be refused for, and what was broken."""
    name = draw(st.sampled_from(sorted(BREAKAGES)))
    reason, change = BREAKAGES[name]
    # Scores of the valid part lie in every task's range, so that only the breakage can be the reason.
    return change(draw(groups()), np.random.default_rng(draw(st.integers(0, 2**32)))), reason, name
