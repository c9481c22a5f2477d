"""The lists of docs/evidence.md, every claim with its verdict and the objectives under lag, and of all verdicts."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Final

from lab.figures import ROOT
from lab.learning.evidence.block_claims import lag_verdicts, objectives_of, way_verdicts
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import UNDECIDED, Cells, Verdict
from lab.learning.evidence.rows import final
from lab.learning.statistics import Interval
from lab.site.lines import fill, items

OURS: Final = "offbeat"
OPEN: Final = "not decided yet"


@dataclass(frozen=True)
class PublishedClaim:
    """Something that a paper or a page of ours says, and the verdicts about it."""

    name: str
    """The end of its anchor on the page of all verdicts."""
    text: str
    source: str
    number: tuple[str, str]
    """The row whose number stands beside the verdict, and what it is."""
    rows: tuple[str, ...]
    """Patterns of the ids of its verdicts."""
    blocks: tuple[str, ...]
    """Whose cells decide it; or a command, if it is measured."""


CLAIMS: Final = (
    PublishedClaim(
        "lag", "Lag is nearly free for objectives whose clip binds at i = 1", "P1",
        ("evidence.a.sums.rec-oneside-nois-v5", "the default at v = 5, final pass rate minus v = 1"),
        ("evidence.a.*.grpo-v*", "evidence.a.*.rec-oneside-*-v*"),
        ("a-sums", "a-sorting"),
    ),
    PublishedClaim(
        "centered", "Lag is nearly free for importance weights with a band around π_k, which never binds at i = 1",
        "P2", ("evidence.a.sums.grpo-off-policy-v5", "`grpo-off-policy` at v = 5, final pass rate minus v = 1"),
        ("evidence.a.*.grpo-off-policy-v*",), ("a-sums", "a-sorting"),
    ),
    PublishedClaim(
        "offset", "At a fixed lag of ten steps, (1, 10), clipped objectives learn as from fresh data", "P1",
        ("evidence.p.sums.rec-oneside-nois-offset-10", "the default at (1, 10), final pass rate minus v = 1"),
        tuple(f"evidence.p.*.{name}-offset-10*" for name in (
            "rec-oneside-nois", "rec-oneside-is", "grpo", "wide-clip", "clip", "wide",
        )),
        ("p1-sums",),
    ),
    PublishedClaim(
        "offline", "Fully offline, a clip keeps training stable, unless it is wide", "P1",
        ("evidence.p.sums.rec-oneside-nois-offline", "the default that never publishes, final pass rate minus v = 1"),
        ("evidence.p.*-offline", "evidence.p.*-offline-*"), ("p1-sums",),
    ),
    PublishedClaim(
        "importance", "Clipping matters, importance sampling does not", "P1",
        ("evidence.a.sums.importance-sampling-high-rate", "lost with importance sampling at a high rate"),
        ("evidence.a.*.importance-sampling*",), ("a-sums", "a-sums-high-rate", "a-sorting"),
    ),
    PublishedClaim(
        "no-clip", "Without a clip, lag makes a run collapse", "P1",
        ("evidence.a.sums.reinforce-v5", "`reinforce` at v = 5 minus v = 1"),
        ("evidence.a.*.reinforce-v*", "evidence.p.*.reinforce-offset-10*"), ("a-sums", "a-sorting", "p1-sums"),
    ),
    PublishedClaim(
        "wide-clip", "A wide clip, (0.6, 2.0), tolerates lag", "P1",
        ("evidence.a.sums.wide-clip-v5", "v = 5 minus v = 1"),
        ("evidence.a.*.wide-clip-v*",), ("a-sums", "a-sorting"),
    ),
    PublishedClaim(
        "off-policy", "Objectives made for off-policy data tolerate lag", "P1 and others",
        ("evidence.a.sums.red-weight-v5", "`red-weight` at v = 5 minus v = 1"),
        tuple(f"evidence.a.*.{name}-v*" for name in (
            "topr", "red-weight", "red-drop", "asymre", "opmd", "rec-ring", "cispo", "grpo-off-policy-capped",
        )),
        ("a-sums", "a-sorting"),
    ),
    PublishedClaim(
        "constants", "With another τ, β or T, those that fail tolerate lag", OURS,
        ("evidence.a.sums.opmd-tau-1-v5", "`opmd` with τ = 1 at v = 5, final pass rate minus v = 1"),
        tuple(f"evidence.a.*.{name}-*" for name in ("opmd-tau", "asymre-baseline_shift", "red-weight-temperature")),
        ("a-sums-tuned",),
    ),
    PublishedClaim(
        "red", "RED helps where few answers are right", "P1",
        ("evidence.a.rare-sums.red-drop", "`red-drop`, area under the curve minus the default's"),
        ("evidence.a.rare-sums.*",), ("a-rare-sums",),
    ),
    PublishedClaim(
        "red-kl", "RED-Weight learns more than GRPO at the same KL", "P1",
        ("evidence.p.sums.red-equal-kl", "pass rate at equal KL, `red-weight` minus `grpo`"),
        ("evidence.p.*.red-equal-kl",), ("p1-sums",),
    ),
    PublishedClaim(
        "mask", "Masking groups of equal rewards makes training stable", "P2",
        ("evidence.p.sums.mask-fresh", "difference that the mask makes at v = 1 with a KL term"),
        ("evidence.p.*.mask-fresh*", "evidence.f.*.with-mask"), ("p2-sums", "f-sums"),
    ),
    PublishedClaim(
        "refill", "Refilling such groups helps", "DAPO",
        ("evidence.f.sums.with-refill", "difference that refilling makes"), ("evidence.f.*.with-refill",), ("f-sums",),
    ),
    PublishedClaim(
        "updates", "Ten updates of a batch are poorer than one", "P2",
        ("evidence.p.sums.i10-fresh", "i = 10 minus i = 1, at v = 1 with a clip"),
        ("evidence.p.*.i10-fresh*", "evidence.f.*.with-i*"), ("p2-sums", "f-sums"),
    ),
    PublishedClaim(
        "reference", "A refreshed reference policy helps", "P2",
        ("evidence.f.sums.with-KL-and-refresh", "difference that it makes"), ("evidence.f.*.with-KL*",), ("f-sums",),
    ),
    PublishedClaim(
        "clock", "A lagging server is 1.35 × as fast by the clock", "P2",
        ("throughput.1.concurrent", "measured throughput of concurrent over lockstep; the others are simulated"),
        ("evidence.c.*", "throughput.1.concurrent"), ("c-sums", "python -m lab.bench.end_to_end"),
    ),
    PublishedClaim(
        "replay", "Replay halves the samples", OURS,
        ("evidence.d.sums.replay-i2-final", "final pass rate, replay minus as many fresh groups trained twice"),
        ("evidence.d.*",), ("d-sums", "d-sorting"),
    ),
    PublishedClaim(
        "publish", "Publishing by drift or cost chooses better moments", OURS,
        ("evidence.b.changing.drift-shuffled", "area, the drift budget minus its own gaps in a random order"),
        ("evidence.b.*",), ("b-changing", "b-conditions", "b-conditions-8"),
    ),
    PublishedClaim(
        "others", "The answers of others help", OURS,
        ("evidence.e.sums.supervised-training-then-fresh-groups-alone", "supervised training on them first"),
        ("evidence.e.*",), ("e-sums",),
    ),
    PublishedClaim(
        "shrunk", "Shrunk advantages help small groups", OURS,
        ("evidence.g.sums.shrunk", "difference that they make"), ("evidence.g.*",), ("g-sums",),
    ),
    PublishedClaim(
        "smollm2", "SmolLM2-135M: v = 10 and replay lose no more than 0.08", OURS,
        ("evidence.smollm2.v10-loss", "v = 10 minus v = 1"), ("evidence.smollm2.*-loss",), ("smollm2",),
    ),
    PublishedClaim(
        "transfer", "One measured quantity predicts what lag costs, for other lengths, rates and models", OURS,
        ("transfer.3.by-objective", "rank correlation, held out: stopped gradient for bands, ESS for weights"),
        ("transfer.3.*",), ("transfer", "python -m lab.learning.evidence.transfer"),
    ),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Return the verdicts so far, then the rows of other areas."""
    results = ROOT / "lab" / "results"
    files = sorted(results.glob("*.json"), key=lambda file: (file.stem != "evidence", file.stem))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def claims_list() -> str:
    """Return one line for each claim: its verdict in words, one number, and a link to all its verdicts."""
    found = rows()
    lines = []
    for claim in CLAIMS:
        verdicts = _verdicts(claim, found)
        row, what = claim.number
        said = [f"[{_mean(one)}]({_page(row)}) ({what})" for one in verdicts if one["id"] == row]
        several = f"all {len(verdicts)}" if len(verdicts) > 1 else "details"
        details = f"[{several}](measured/evidence.md#claim-{claim.name})"
        judged = ", ".join([_words(verdicts), *said]) if verdicts else OPEN
        lines.append(f"**{claim.text}** ({claim.source}): {judged}; {details}")
    return items(lines)


def claims_in_full() -> str:
    """Return every verdict of every claim, with the command that computes it."""
    found = rows()
    parts = []
    for claim in CLAIMS:
        verdicts = [
            f"[{row['id'].removeprefix('evidence.')}]({_page(row['id']).removeprefix('measured/')}): "
            f"{_measured(row)}, n = {row['n']}"
            for row in _verdicts(claim, found)
        ]
        about = fill(f'<a id="claim-{claim.name}"></a> {_commands(claim.blocks)}')
        parts.append(f"### {claim.text}\n\n{about}\n\n{items(verdicts or [OPEN])}")
    return "\n".join(parts)


def _verdicts(claim: PublishedClaim, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in found if any(fnmatch(row["id"], pattern) for pattern in claim.rows)]


def _words(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return how often each verdict was given; a regret, which is a number, is none."""
    judged = [str(row["measured"]).partition(":") for row in verdicts]
    counted = Counter(word for word, colon, _ in judged if colon).most_common()
    return ", ".join(word if len(verdicts) == 1 else f"{count} × {word}" for word, count in counted)


def _mean(row: dict[str, Any]) -> str:
    return str(row["measured"]).rpartition(": ")[2].partition(" ")[0]


def _page(row: str) -> str:
    return f"measured/{row.partition('.')[0]}.md#{row}"


def _measured(row: dict[str, Any]) -> str:
    """Return a verdict with its numbers, or what was measured with its goal."""
    if row["id"].startswith("evidence."):
        return str(row["measured"])
    return f"{row['measured']} {row['unit']} (goal {row['goal']}, {'met' if row['holds'] else 'missed'})"


def _commands(blocks: Sequence[str]) -> str:
    commands = {"smollm2": "python -m lab.learning.evidence.smollm2"}
    commands |= {block: f"… sweep --block {block}" for block in BLOCKS}
    return "Runs: " + ", ".join(f"`{commands.get(block, block)}`" for block in blocks) + "."


def lag_list() -> str:
    """Return one line for each objective of block a on the sums: its pass rate at v = 1, and what longer lags cost."""
    block = BLOCKS["a-sums"]
    cells = Cells(block, block.done())
    if block.count_missing(cells.done):
        return f"{OPEN}\n"
    verdicts, ways = lag_verdicts(cells), way_verdicts(cells)
    by_loss = sorted(objectives_of(block), key=lambda name: -verdicts[f"{name} v{LAGS[1]}", f"{name} v1"].interval.mean)
    lines = []
    for name in by_loss:
        fresh = Interval.of([*map(final, cells.of(f"{name} v1"))])
        arms = [(v, (f"{name} v{v}", f"{name} v1")) for v in LAGS[1:]]
        lagged = [f"v = {v} {_judged(verdicts[pair])}, {_on_the_way(ways[pair])}" for v, pair in arms]
        lines.append(f"**{name}** {fresh}; {'; '.join(lagged)}")
    return items(lines)


def _judged(verdict: Verdict) -> str:
    return f"[{verdict.word.split()[0]}]({_page(verdict.claim.id)}) {verdict.interval.mean:.3f}"


def _on_the_way(verdict: Verdict) -> str:
    return f"[{verdict.word if verdict.word != UNDECIDED else 'way undecided'}]({_page(verdict.claim.id)})"


BUILDERS: Final[dict[str, Callable[[], str]]] = {
    "evidence": claims_list,
    "claims": claims_in_full,
    "evidence-lag": lag_list,
}
