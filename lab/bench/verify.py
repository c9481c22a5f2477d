"""Measure answer verification.

    python -m lab.bench.verify gsm8k     all of GSM8K: every reference in every spelling, and altered answers: rows
                                         tasks.1.*; minutes
    python -m lab.bench.verify hostile   mathematics answers that try to stall the grader, alone and with honest ones:
                                         rows tasks.2.*; minutes
    python -m lab.bench.verify cheats    answers that fake success: row tasks.4.answers; seconds

`--short` runs a small part and records nothing.
"""

import json
import random
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, report
from offbeat.scoring.pool import ScoringPool
from offbeat.scoring.tally import FailureLimit, failure_of
from offbeat.tasks.gsm8k import correct, reference_answer
from offbeat.tasks.task import make
from offbeat.types import Score
from offbeat.verify import choice, numeric
from tests.fixtures.attacks import hostile_answers
from tests.fixtures.attacks.answer_cheats import CHOICES, NUMBERS
from tests.fixtures.gsm8k_spellings import SPELLINGS, altered

DATA = ROOT.parent / "shared" / "data" / "gsm8k"
WORKERS = 2
Attack = tuple[str, str, str]
"""Name, completion, reference."""


def solutions(name: str) -> list[str]:
    """Return the reference solutions of one split."""
    with Path(DATA, f"{name}.jsonl").open(encoding="utf-8") as file:
        return [str(json.loads(line)["answer"]) for line in file]


def gsm8k(short: bool) -> bool:
    """Rows tasks.1.*."""
    written = solutions("test") + solutions("train")
    written = written[:200] if short else written
    references = [reference_answer(solution) for solution in written]
    answers = [Decimal(reference.replace(",", "")) for reference in references]
    refused, accepted = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for reference, answer, solution in zip(references, answers, written, strict=True):
        refused["the reference solution itself"] += not correct(solution, {"answer": reference})
        for spelling in SPELLINGS:
            refused[spelling.name] += not correct(spelling.write(answer), {"answer": reference})
    right = len(references) * (len(SPELLINGS) + 1)
    milliseconds = (time.perf_counter() - start) / right * 1e3
    rng, wrong = random.Random(4), 0
    for at, reference in enumerate(references):
        for name, value in altered(answers, at, rng).items():
            wrong += 1
            accepted[name] += bool(correct(rng.choice(SPELLINGS).write(value), {"answer": reference}))
    kinds = ", ".join(sorted(accepted))
    print("right answers refused:", +refused, "wrong answers accepted:", +accepted)
    figures = [
        Figure(
            "tasks.1.spellings",
            f"GSM8K reference answers accepted, {len(references):,} problems in {len(SPELLINGS) + 1} spellings each",
            "all 1,319 + 7,473, in at least 12 spellings",
            f"{right - refused.total():,} of {right:,}",
            "answers",
            refused.total() == 0 and len(SPELLINGS) >= 12 and len(references) == 1_319 + 7_473,
            right,
            f"{milliseconds:.2f} ms each; the spellings are listed in docs/reference/tasks.md",
        ),
        Figure(
            "tasks.1.altered",
            "altered GSM8K answers rejected, each in a spelling drawn at random",
            "all of at least 10,000",
            f"{wrong - accepted.total():,} of {wrong:,}",
            "answers",
            accepted.total() == 0 and wrong >= 10_000,
            wrong,
            kinds,
        ),
    ]
    return report(short, *figures) or short


def hostile(short: bool) -> bool:
    """Rows tasks.2.*."""
    pairs, per_round = (1, 100) if short else (30, 1_500)
    attacks = hostile_answers.hostile()
    random.Random(2).shuffle(attacks)
    attacks = attacks[:8] if short else attacks
    task = make("math", {"source": "none.jsonl"})
    with ScoringPool.of(task, workers=WORKERS, limit=FailureLimit(share=1.0)) as pool:
        ends = Counter[str]()
        for name, text, reference in attacks:
            outcome = pool.score(text, {"answer": reference}, of=name).result(timeout=60)
            ends[failure_of(outcome) or f"reward {outcome.reward:g}"] += 1  # type: ignore[union-attr]
        slowest = pool.report().slowest
        for entry in slowest:
            print(f"{entry.seconds:.2f} s  {entry.of}: {entry.outcome}"[:120])
        quiet, disturbed, wrong = _rounds(pool, attacks, pairs, per_round)
    share = sum(quiet) / sum(disturbed)
    low, high = _interval(quiet, disturbed)
    count = pairs * per_round
    figures = [
        Figure(
            "tasks.2.slowest",
            "hostile mathematics answers: the slowest, from a scoring worker taking it to its verdict",
            "≤ 2.5 s each, at least 60",
            round(slowest[0].seconds, 2),
            "s",
            slowest[0].seconds <= 2.5 and len(attacks) >= 60,
            ends.total(),
            "; ".join(f"{n} {end}" for end, n in sorted(ends.items())) + f"; the slowest: {slowest[0].of}",
        ),
        Figure(
            "tasks.2.rate",
            f"honest answers a second in a pool of {WORKERS} workers, hostile ones among them, against without them",
            "≥ 95 %",
            round(100 * share, 1),
            "%",
            share >= 0.95 and wrong == 0,
            2 * count,
            f"{count / sum(disturbed):.0f}/s against {count / sum(quiet):.0f}/s; one hostile answer in "
            f"{count // len(attacks)}; {pairs} pairs of rounds in turn, 95 % interval over pairs {100 * low:.0f} to "
            f"{100 * high:.0f} %; {wrong} honest answers with a wrong verdict or none; most hostile ones are refused "
            "unparsed, the others hold a worker until their deadline at most",
        ),
    ]
    return report(short, *figures) or short


def _interval(quiet: list[float], disturbed: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of rates, by bootstrap over pairs of rounds."""
    rng, pairs = random.Random(0), list(zip(quiet, disturbed, strict=True))
    draws = [rng.choices(pairs, k=len(pairs)) for _ in range(2_000)]
    ratios = sorted(sum(q for q, _ in draw) / sum(d for _, d in draw) for draw in draws)
    return ratios[50], ratios[-51]


def _rounds(
    pool: ScoringPool, attacks: list[Attack], pairs: int, per_round: int
) -> tuple[list[float], list[float], int]:
    """Run rounds without and with hostile answers in turn. Return their seconds and the number of wrong scores."""
    seconds: tuple[list[float], list[float]] = ([], [])
    wrong, each = 0, -(-len(attacks) // pairs)
    for number in range(2 * pairs):
        pair, with_attacks = divmod(number, 2)
        _round(pool, 200, [], seed=10_000 + number)  # restarts workers that were killed in the round before
        present = attacks[pair * each : (pair + 1) * each] if with_attacks else []
        took, missed = _round(pool, per_round, present, seed=number)
        seconds[with_attacks].append(took)
        wrong += missed
    return *seconds, wrong


def _round(pool: ScoringPool, count: int, attacks: list[Attack], seed: int) -> tuple[float, int]:
    """Return the seconds until the last honest answer has its score, and how many scores are wrong.

    The hostile answers come in the first half, so that their cost falls into the round.
    """
    answers = hostile_answers.honest(count, seed)
    places = sorted(random.Random(seed).choices(range(count // 2), k=len(attacks)), reverse=True)
    start, futures, others = time.perf_counter(), [], []
    waiting = list(zip(places, attacks, strict=True))
    for at, (text, reference, _) in enumerate(answers):
        while waiting and waiting[-1][0] == at:
            _, (name, attack, attack_reference) = waiting.pop()
            others.append(pool.score(attack, {"answer": attack_reference}, of=name))
        futures.append(pool.score(text, {"answer": reference}))
    outcomes = [future.result(timeout=300) for future in futures]
    took = time.perf_counter() - start
    for other in others:
        other.result(timeout=60)
    rewards = [outcome.reward if isinstance(outcome, Score) else None for outcome in outcomes]
    return took, sum(reward != float(right) for reward, (_, _, right) in zip(rewards, answers, strict=True))


def cheats(short: bool) -> bool:
    """Row tasks.4.answers."""
    rewarded = [text for text in NUMBERS if numeric(text, "18")] + [text for text in CHOICES if choice(text, "B")]
    honest = [numeric("The answer is 18.", "18"), choice("The answer is B.", "B")]
    figure = Figure(
        "tasks.4.answers",
        "answers that fake success and score above 0",
        "0",
        len(rewarded),
        "cheats",
        not rewarded and all(honest),
        len(NUMBERS) + len(CHOICES),
        f"{len(NUMBERS)} for a number (dumps, hedges, denials, unfinished marks), {len(CHOICES)} for a choice",
    )
    return report(short, figure) or short


def main() -> None:
    commands = {"gsm8k": gsm8k, "hostile": hostile, "cheats": cheats}
    parser = command_parser(__doc__, short="run a small part and record nothing")
    parser.add_argument("command", choices=sorted(commands))
    arguments = parser.parse_args()
    sys.exit(not commands[arguments.command](arguments.short))


if __name__ == "__main__":
    main()
