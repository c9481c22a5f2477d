r"""Answers do not dodge their reward by making their grader fail; honest ones are not punished for a grader's fault.

    python -m lab.attacks.dodges             everything; about 8 minutes; rows trust.2, trust.2.right, trust.2.random
                                             and trust.2.evaluation; continues after `lab/attacks/dodges.jsonl`
    python -m lab.attacks.dodges --short     a few graders and answers; records nothing

- trust.2: reward functions of many kinds, each with hostile answers that make it open files with too long a name, wait,
  fill memory, call hosts that do not exist, raise, or return None and infinity. A dodge is a hostile answer without a
  score. Honest answers, right and wrong, come before and after them.
- trust.2.right: reward functions that fail on the right answer. It has to be recognized, and gets no floor; wrong
  answers that make the same functions fail have to get the floor.
- trust.2.random: simulated graders that fail at random, with seeded numbers.
- trust.2.evaluation: random tables, of which some completions have no score: the rates with the scores that they would
  have had are within the bounds, and an answer that caused that it has no score is wrong.
"""

import json
import math
import random
import sys
import time
from collections import Counter
from typing import Final

from lab.figures import ROOT, Figure, command_parser, commit, machine, report
from offbeat.evaluation import Attempts, counted, evaluate
from offbeat.scoring.blame import FailureShare, find_cause
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.scoring.tally import FailureLimit
from offbeat.tasks.rewards import Reward
from offbeat.types import Score, Unscorable
from tests.fixtures.attacks.dodgeable_rewards import (
    FAILING_FORMS,
    FAILS_ON_RIGHT,
    GRADERS,
    HOSTILE,
    REFERENCE,
    RIGHT_FORMS,
    WRONG_FORMS,
    Grader,
    judge_server,
    unreliable_judge,
)

RESULTS: Final = ROOT / "lab" / "attacks" / "dodges.jsonl"
DEADLINE: Final = 0.4
BEFORE: Final = 40
"""Honest answers before the hostile ones."""
MEMORY_MIB: Final = 512
EAGER: Final = FailureLimit(share=0.05, window=40, least=10)
"""Ends a run sooner than the default does."""
SHARES: Final = (0.0, 0.1, 0.3, 0.5)
HONEST, HOSTILE_TRIES = 20_000, 4_000

Row = dict[str, object]


def shown(outcome: Outcome) -> str:
    if isinstance(outcome, Unscorable):
        return f"unscorable by {outcome.blame}: {outcome.reason}: {outcome.detail[:160]}"
    return f"fault {outcome.fault}" if outcome.fault else f"reward {outcome.reward:g}"


def attacked(grader: Grader, port: int, hostile: tuple[str, ...], before: int) -> list[Row]:
    """Score honest answers, hostile ones, and honest ones again; a row for each."""
    columns = {"prompt": "6*7=", "answer": REFERENCE, "port": port, **grader.columns}
    honest = [(grader.right, 1.0), (grader.wrong, 0.0)]
    rows: list[Row] = []
    began = time.monotonic()
    with ScoringPool([grader.reward], workers=1, deadline=DEADLINE, memory_mib=MEMORY_MIB, limit=EAGER) as pool:
        cases = [*honest * (before // 2), *((text, None) for text in hostile), *honest * 2]
        for text, expected in cases:
            try:
                outcome = pool.score(text, columns).result(timeout=600)
            except Exception as error:  # the run would have ended
                rows.append({"kind": "ended", "text": text[:60], "outcome": repr(error)[:300]})
                return rows
            kind = "hostile" if expected is None else "honest"
            good = isinstance(outcome, Score) and (
                expected is None or (outcome.reward == expected and not outcome.fault)
            )
            rows.append({"kind": kind, "good": good, "text": text[:60], "outcome": shown(outcome)})
    seconds = time.monotonic() - began
    return [row | {"grader": grader.name, "seconds": round(seconds, 1)} for row in rows]


def dodges(short: bool) -> Figure:
    graders, hostile = (GRADERS[::6], HOSTILE[::3]) if short else (GRADERS, HOSTILE)
    key, done, rows = commit(), {}, []
    if RESULTS.exists() and not short:
        found = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        done = {one["grader"]: one["rows"] for one in found if one["commit"] == key}
    with judge_server() as port:
        for grader in graders:
            if grader.name not in done:
                done[grader.name] = attacked(grader, port, hostile, BEFORE)
                if not short:
                    with RESULTS.open("a") as file:
                        file.write(json.dumps({"grader": grader.name, "commit": key, "rows": done[grader.name]}) + "\n")
            rows += done[grader.name]
            print(grader.name, Counter(str(row["outcome"]).split(":")[0] for row in done[grader.name]), flush=True)
    bad = [row for row in rows if not row.get("good")]
    for row in bad[:30]:
        print(json.dumps(row)[:400])
    counts = Counter(str(row["kind"]) for row in bad)
    tried = sum(row["kind"] == "hostile" for row in rows)
    return Figure(
        "trust.2",
        "hostile answers that dodge their reward; honest answers punished; runs ended",
        "0; 0; 0, of at least 30 reward functions and 20 answers",
        f"{counts['hostile']} of {tried:,}; {counts['honest']} of {sum(row['kind'] == 'honest' for row in rows):,}; "
        f"{counts['ended']} of {len(graders)}",
        "answers and runs",
        not bad and (short or (len(graders) >= 30 and len(hostile) >= 20)),
        tried,
        f"{len(graders)} reward functions × {len(hostile)} answers, deadline {DEADLINE} s; {machine()}",
    )


def right_answers(short: bool) -> Figure:
    wrong: list[str] = []
    recognized = tried = floors = 0
    for function, named in FAILS_ON_RIGHT[: 2 if short else None]:
        columns = {"prompt": "6*7=", **named}
        reward = Reward(function)
        with ScoringPool([reward], (-math.inf, math.inf), workers=1, deadline=DEADLINE, limit=EAGER) as pool:
            pool.score_all([(text, columns) for text in WRONG_FORMS * 10])
            for text in RIGHT_FORMS:
                outcome = pool.score(text, columns).result(timeout=600)
                good = isinstance(outcome, Unscorable) and outcome.blame == "right"
                recognized, tried = recognized + good, tried + 1
                wrong += [] if good else [f"{reward.name} {text!r}: {shown(outcome)}"]
            for text in FAILING_FORMS:
                outcome = pool.score(text, columns).result(timeout=600)
                floors += isinstance(outcome, Score)
                wrong += [] if isinstance(outcome, Score) else [f"{reward.name} {text!r}: {shown(outcome)}"]
    print(*wrong, sep="\n")
    return Figure(
        "trust.2.right",
        "right answers that make their grader fail, recognized and left out with an alarm",
        "all, and wrong answers to the same graders have a reward",
        f"{recognized} of {tried}",
        "answers",
        not wrong,
        tried,
        f"{floors} of {tried} wrong answers to the same reward functions have a reward, those that fail the floor",
    )


def simulated(share: float, honest: int, hostile: int, seed: int) -> tuple[int, int, int]:
    """Return honest answers punished, hostile ones that got away, and the most tries that one answer took."""
    rng, known = random.Random(seed), FailureShare()
    punished = away = most = 0
    every = honest // hostile
    for number in range(honest):
        tries = 0

        def works() -> bool:
            nonlocal tries
            tries += 1
            return rng.random() >= share

        if works():
            known.add(1, 0)
        else:
            punished += find_cause(works, works, known, lambda: True) == "answer"
        if number % every == 0:
            away += find_cause(lambda: False, works, known, lambda: True) != "answer"
        most = max(most, tries)
    return punished, away, most


def at_random(short: bool) -> Figure:
    honest, hostile = (4_000, 800) if short else (HONEST, HOSTILE_TRIES)
    parts, holds = [], True
    for share in SHARES:
        punished, away, most = simulated(share, honest, hostile, seed=int(share * 10))
        holds &= punished <= 1e-3 * honest and away <= 1e-3 * hostile
        parts.append(f"{share:.0%}: {punished} punished, {away} away, at most {most} tries")
    return Figure(
        "trust.2.random",
        "honest answers punished and hostile ones that get away, by the share of tries in which the grader fails",
        "at most 1 in 1,000 each",
        "; ".join(parts),
        "answers",
        holds,
        honest * len(SHARES),
        f"{honest:,} honest and {hostile:,} hostile answers for each share, on simulated graders",
    )


def bounds(short: bool) -> Figure:
    rng, wrong, tables = random.Random(2), 0, 40 if short else 400
    for _ in range(tables):
        truth, seen = [], []
        for prompt in range(rng.randint(1, 12)):
            rate, hidden = rng.random(), rng.random() * 0.7
            given = [float(rng.random() < rate) for _ in range(rng.choice([2, 4, 8]))]
            truth.append(Attempts(str(prompt), "all", given))
            seen.append(Attempts(str(prompt), "all", [None if rng.random() < hidden else one for one in given]))
        ks = [2]
        [real], [shown_row] = evaluate(truth, ks), evaluate(seen, ks)
        for name, estimate in shown_row.estimates.items():
            wrong += not estimate.low <= real.estimates[name].value <= estimate.high
    dodged = [counted(Score(1.0))] + [counted(Unscorable("crash", "by the answer: it died"))] * 3
    floors = [counted(Score(1.0))] + [counted(Score(0.0, {"unscorable.crash": 0.0}))] * 3
    rates = [evaluate([Attempts("p", "all", one)])[0].estimates["pass@1"].value for one in (dodged, floors)]
    return Figure(
        "trust.2.evaluation",
        "rates outside of the bounds that are shown without some of the scores; pass@1 of 1 right and 3 dodged answers",
        "0; 0.25",
        f"{wrong}; {rates[0]:g} without a reward for dodges, {rates[1]:g} with the floor",
        "rates",
        not wrong and rates == [0.25, 0.25],
        tables,
        "pass@1, pass@2 and the mean reward of tables of 1 to 12 prompts, up to 70 % of the scores left out",
    )


def main() -> bool:
    short = command_parser(__doc__, short="a few graders and answers").parse_args().short
    assert unreliable_judge.__name__ in {grader.name for grader in GRADERS}
    return report(short, bounds(short), at_random(short), right_answers(short), dodges(short))


if __name__ == "__main__":
    sys.exit(not main())
