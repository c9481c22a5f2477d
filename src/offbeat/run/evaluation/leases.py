"""The prompts of one evaluation until all are answered, and when the next one is due. Pure state machines.

An evaluation measures a published version, by the engines that serve it. `EvaluationSchedule` says which version and
when; `EvaluationLeases` keeps the prompts of one evaluation until every one of them is answered by that version: by the
workers of a run, or by an engine that `rates.ask` has for itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import cast

from offbeat.evaluation import Attempts, counted, evaluate
from offbeat.rollout.prompt_leases import EvaluationSampling, PromptLease, PromptLeases
from offbeat.scoring.tally import count_outcomes
from offbeat.types import Completion, Group, Json, Prompt


@dataclass(frozen=True)
class EvaluationPrompt:
    """Completions of one prompt that one call generates. A prompt with many samples has several of them."""

    place: int
    """The prompt's place in the evaluation; completions of one place are attempts at one prompt."""
    prompt: Prompt
    size: int
    seed: int
    temperature: float = 1.0
    greedy: bool = False
    beside: bool = False
    """True for the one greedy completion of a prompt that stands beside the sampled ones."""
    held_out: bool | None = None
    """Whether the prompt is kept out of training; None if that is not known."""
    k: int = 1
    """For pass@k."""


class EvaluationLeases(PromptLeases):
    """The leases of one evaluation, for workers that serve the evaluated version.

    >>> asked = [EvaluationPrompt(i, Prompt(f"p{i}", [i], "arithmetic"), size=1, seed=i) for i in range(3)]
    >>> leases = EvaluationLeases(4, asked, seconds=60)
    >>> [lease.group_id for lease in leases.take(2, now=0.0, by="worker 0", version=4)]
    ['evaluation-4-0', 'evaluation-4-1']
    >>> leases.take(2, now=0.0, by="worker 1", version=3)     # serves another version
    []
    """

    def __init__(self, version: int, prompts: Sequence[EvaluationPrompt], seconds: float) -> None:
        """Start an evaluation of a version.

        Args:
            version: The version that must generate every token.
            prompts: What is asked.
            seconds: How long a lease lasts without renewal.
        """
        super().__init__(lambda at: prompts[at].prompt, name=f"evaluation-{version}", seed=0, seconds=seconds)
        self.version, self._prompts = version, prompts
        self._answers: dict[int, Group] = {}

    def take(self, count: int, now: float, by: str, version: int | None) -> list[PromptLease]:
        """See `PromptLeases`. Returns fewer leases, or none, if fewer prompts are left for a worker of this version."""
        self.expire(now)
        left = len(self._returned) + len(self._prompts) - self._next
        return super().take(min(count, left), now, by, version) if version == self.version else []

    def _lease_at(self, position: int) -> PromptLease:
        one = self._prompts[position]
        sampling = EvaluationSampling(one.size, one.temperature, one.greedy)
        return PromptLease(f"{self._name}-{position}", one.prompt, one.seed, evaluation=sampling)

    def answer(self, groups: Sequence[Group]) -> None:
        """Take in scored groups. One with a token of another version does not count: its prompt is asked again."""
        pure = {group.id: group for group in groups if _versions(group) <= {self.version}}
        self.give_back(group.id for group in groups if group.id not in pure)
        for position in self._positions(pure):
            self._answers.setdefault(position, pure[f"{self._name}-{position}"])
        self.finish(pure)

    @property
    def answered(self) -> int:
        """How many of the prompts are answered."""
        return len(self._answers)

    @property
    def missing(self) -> int:
        """How many are not."""
        return len(self._prompts) - len(self._answers)

    def attempts(
        self,
        slice_of: Callable[[Prompt], str] = lambda prompt: "all",
        final_answer: Callable[[Completion], str | None] | None = None,
    ) -> list[Attempts]:
        """Return the attempts at each prompt, in order, when nothing is missing.

        Args:
            slice_of: The row of the table to which a prompt belongs.
            final_answer: The final answer of a completion, for maj@k.
        """
        found: dict[int, Attempts] = {}
        for position, asked in enumerate(self._prompts):
            one = found.setdefault(asked.place, Attempts(asked.prompt.id, slice_of(asked.prompt), []))
            completions = self._answers[position].completions
            rewards = [counted(each.score) for each in completions]
            if asked.beside:
                found[asked.place] = replace(one, greedy=nan if rewards[0] is None else rewards[0])
                continue
            answers = [*(one.answers or ()), *map(final_answer, completions)] if final_answer else None
            found[asked.place] = replace(one, rewards=[*one.rewards, *rewards], answers=answers)
        return list(found.values())

    def rates(self) -> dict[str, Json]:
        """Return the fields of an `evaluated` event when nothing is missing: each rate as [value, low, high].

        >>> from offbeat.types import Score, VersionSpan
        >>> leases = EvaluationLeases(4, [EvaluationPrompt(0, Prompt("p", [1], "arithmetic"), size=1, seed=0)], 60)
        >>> answer = Completion("c", [2], [-0.1], (VersionSpan(4, 0, 1),), score=Score(1.0))
        >>> leases.answer([Group(leases.take(1, 0.0, "a worker", 4)[0].group_id, Prompt("p", [1], "sums"), (answer,))])
        >>> leases.rates()["pass@1"][0], leases.rates()["distinct"]
        (1.0, 1)
        """
        attempts, first = self.attempts(), self._prompts[0]
        [row] = evaluate(attempts, [first.k])
        estimates: dict[str, Json] = {
            "pass@k" if first.k > 1 and name == f"pass@{first.k}" else name: [one.value, one.low, one.high]
            for name, one in row.estimates.items()
        }
        outcomes = count_outcomes([*self._answers.values()])
        return {
            "prompts": row.prompts,
            "distinct": len({asked.prompt.token_ids.tobytes() for asked in self._prompts}),
            "samples": max((len(one.rewards) for one in attempts), default=0),
            "k": first.k,
            "held_out": first.held_out,
            "temperature": first.temperature,
            "unscorable": row.unscorable,
            "answer_faults": sum(count for _, what, count in outcomes if what.startswith("answer ")),
            **estimates,
        }


def _versions(group: Group) -> set[int]:
    return {span.version for one in group.completions for span in one.versions}


@dataclass
class EvaluationSchedule:
    """Which version is evaluated when: every so many steps, as soon as a version is served that was not evaluated yet.

    >>> schedule = EvaluationSchedule(every=2)
    >>> schedule.mark(0)
    >>> schedule.begin(served=0)
    0
    >>> schedule.end()
    >>> schedule.mark(2)
    >>> schedule.begin(served=0)          # nothing newer is served
    >>> schedule.begin(served=3)
    3
    """

    every: int
    """Steps between evaluations; 0 turns them off."""
    evaluated: int = -1
    """The version evaluated last."""
    due: bool = False
    running: int | None = None
    """The version being evaluated."""

    def mark(self, step: int) -> None:
        """Note that a step is done."""
        self.due |= bool(self.every) and step % self.every == 0

    def begin(self, served: int) -> int | None:
        """Return the version to evaluate now, if an evaluation is due and none is running."""
        if not self.due or served <= self.evaluated or self.running is not None:
            return None
        self.running, self.due = served, False
        return served

    def end(self) -> None:
        """Note that the running evaluation has its result."""
        assert self.running is not None
        self.evaluated, self.running = self.running, None

    def state(self) -> dict[str, Json]:
        """Return the state for a checkpoint. A running evaluation counts as due."""
        return {"evaluated": self.evaluated, "due": self.due or self.running is not None}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Go back to `state`."""
        self.evaluated, self.due = cast(int, state["evaluated"]), cast(bool, state["due"])
