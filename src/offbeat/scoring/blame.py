r"""Who caused a failed scoring: the answer or the grader? One rule for failures of every kind.

No failure is the grader's by its looks: an answer can make a grader open a file with too long a name, wait, fill its
memory, call a host that does not exist, or return None. So the failed answer and a control are graded in turn, with the
same columns. Controls are answers that had a score: the best to this prompt, then the latest. Without any, the first of
the references in the columns, "0" and an empty text that has a score is the control.

- The answer has a score after all: it counts, and the failure is forgotten.
- A control has a score, and the answer has failed n times: it caused that, and gets the task's `answer_fault`.
- All c tries of controls failed: the grader caused it. `Unscorable`, and the only kind that can end the pool.

If the grader fails at random in a share s of its tries, an honest answer is punished with probability sⁿ, and one that
always fails gets away with sᶜ. The pool measures s, and chooses n and c so that each is at most 1/2,000 (two tries if s
is about 0, seven if it is 0.3) and below 1/1,000 with the error of the measurement. Above one half nothing can be
decided, and the grader is to blame. A trial has at most `MOST` rounds; after `PATIENCE` deadlines and four tries, a
probability of 1/20 is enough. What failed for every control is known for `SHARED` seconds: then one failed control is.

A right answer that makes the grader fail, as in `log10(abs(x - ref))`, is no dodge. It is `Unscorable`, counted apart
(its `blame` is "right"), and an alarm. An answer is right if its final answer is that of a reference or of the best
answer. So leaving it out does not pay: a right answer that does not fail gets more. Without reference and best answer
it cannot be told from a dodge: it gets the `answer_fault`, which is counted and shown apart from a plain reward.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from offbeat.types import Json, Unscorable
from offbeat.verify import UnreadableReference, exact, numeric
from offbeat.verify.extract import final_answers, last_line

CHANCE: Final = 1 / 2000
_LATE, _LEAST = 1 / 20, 3  # for a trial that runs out of time, after so many tries
MOST: Final = 16
PATIENCE: Final = 12.0
SHARED: Final = 60.0
_REFERENCES: Final = re.compile(
    r"(?:^|[^a-z])(?:answer|solution|truth|target|reference|ref|expected|gold|label|correct|result|output)s?[^a-z]*$"
)


@dataclass
class FailureShare:
    """How often the grader fails at random, over about the last 200 tries of answers that it can grade."""

    tries: float = 0.0
    failures: float = 0.0

    def add(self, tries: int, failures: int) -> None:
        kept = 0.995**tries
        self.tries, self.failures = self.tries * kept + tries, self.failures * kept + failures

    def chance(self, failed: int, tries: int = 0, failures: int = 0) -> float:
        """Return the probability of so many failures in a row. Two in three count in advance, for a new grader."""
        return float(((self.failures + failures + 2) / (self.tries + tries + 3)) ** failed)


def find_cause(
    again: Callable[[], bool], control: Callable[[], bool | None], share: FailureShare, in_time: Callable[[], bool]
) -> Literal["none", "answer", "grader"]:
    """Decide who caused a failure. Both functions try once and return True for a score; None: there is no control."""
    failed, scores, failures = 1, 0, 0
    for _ in range(MOST):
        if (scored := control()) is None:
            return "grader"
        scores, failures = scores + scored, failures + (not scored)
        if not scores and share.chance(failures) <= CHANCE:
            return "grader"
        if again():
            share.add(failed + 1 + scores + failures, failed + failures)
            return "none"
        failed += 1
        late = failed > _LEAST and not in_time()
        sure = scores > 0 and share.chance(failed, scores + failures, failures) <= (_LATE if late else CHANCE)
        if sure or late:
            share.add(scores + failures, failures if scores else 0)
            return "answer" if sure else "grader"
    return "grader"


def place(failure: Unscorable) -> str:
    """Return what failed and where, without what differs between answers: quotations and numbers, but for the line."""
    return f"{failure.reason} " + re.sub(r"'.*'|\".*\"|\d+(?!\))", "", failure.detail, flags=re.DOTALL)


def references(value: Json, named: bool = False) -> Iterator[str]:
    """Yield what columns call the answer, wherever it is in them.

    >>> [*references({"prompt": "6*7=", "reward_model": {"ground_truth": 42, "style": "rule"}, "gold_answers": ["a"]})]
    ['42', 'a']
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from references(inner, named or bool(_REFERENCES.search(key.lower())))
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner, named)
    elif named and value is not None:
        yield str(value)


def agrees(text: str, known: Iterable[str]) -> bool:
    r"""Return True if the final answer of a text is that of an answer that is known to be right.

    >>> agrees("It is 42.0", ["42"]), agrees("so\n#### 42", ["6*7=42\n#### 42"]), agrees("}", ["int f() {\n}"])
    (True, True, False)
    """
    for right in known:
        wanted = final_answers(right)
        if "".join(text.split()) == "".join(right.split()):
            return True
        if len(wanted) > 1 or ("\n" in right.strip() and wanted == (last_line(right),)):  # no mark in several lines
            continue
        for same in (numeric, exact):
            with suppress(UnreadableReference):
                if same(text, wanted[0]):
                    return True
    return False
