"""The tables of docs/evidence.md: every claim with its verdicts, and the objectives under lag."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Final

from lab.figures import ROOT
from lab.learning.evidence.block_claims import lag_verdicts, objectives_of
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import Cells, Verdict
from lab.learning.evidence.rows import final
from lab.learning.evidence.rows import rows as cell_rows
from lab.learning.statistics import Interval
from lab.site.reference import table

P1: Final = "[P1](https://arxiv.org/abs/2509.24203)"
P2: Final = "[P2](https://arxiv.org/abs/2505.22257)"
OURS: Final = "offbeat"
OPEN: Final = "not decided yet"


@dataclass(frozen=True)
class PublishedClaim:
    """Something that a paper or a page of ours says, and the verdicts about it."""

    text: str
    source: str
    rows: tuple[str, ...]
    """Patterns of the ids of its verdicts."""
    blocks: tuple[str, ...]
    """Whose cells decide it; or a command, if it is measured."""


CLAIMS: Final = (
    PublishedClaim(
        "Lag is nearly free for clipped objectives", f"{P1}, {P2}",
        ("evidence.a.*.grpo-v*", "evidence.a.*.grpo-off-policy-v*", "evidence.a.*.rec-oneside-*-v*"),
        ("a-sums", "a-sorting"),
    ),
    PublishedClaim(
        "Clipping matters, importance sampling does not", P1, ("evidence.a.*.importance-sampling*",),
        ("a-sums", "a-sums-high-rate", "a-sorting"),
    ),
    PublishedClaim(
        "Without a clip, lag makes a run collapse", P1, ("evidence.a.*.reinforce-v*",), ("a-sums", "a-sorting")
    ),
    PublishedClaim(
        "A wide clip, (0.6, 2.0), tolerates lag", P1, ("evidence.a.*.wide-clip-v*",), ("a-sums", "a-sorting")
    ),
    PublishedClaim(
        "Objectives made for off-policy data tolerate lag", f"{P1} and others",
        tuple(f"evidence.a.*.{name}-v*" for name in (
            "topr", "red-weight", "red-drop", "asymre", "opmd", "rec-ring", "cispo", "grpo-off-policy-capped",
        )),
        ("a-sums", "a-sorting"),
    ),
    PublishedClaim("RED helps where few answers are right", P1, ("evidence.a.rare-sums.*",), ("a-rare-sums",)),
    PublishedClaim(
        "Masking groups of equal rewards makes training stable", P2, ("evidence.f.*.with-mask",), ("f-sums",)
    ),
    PublishedClaim("Refilling such groups helps", "DAPO", ("evidence.f.*.with-refill",), ("f-sums",)),
    PublishedClaim("Ten updates of a batch are poorer than one", P2, ("evidence.f.*.with-i*",), ("f-sums",)),
    PublishedClaim("A refreshed reference policy helps", P2, ("evidence.f.*.with-KL*",), ("f-sums",)),
    PublishedClaim(
        "A lagging server is 1.35 × as fast by the clock, which is measured throughput. Our verdicts are in simulated "
        "seconds until a pass rate of 0.8; the last row is measured", P2,
        ("evidence.c.*", "throughput.1.concurrent"), ("c-sums", "python -m lab.bench.end_to_end"),
    ),
    PublishedClaim("Replay halves the samples", OURS, ("evidence.d.*",), ("d-sums", "d-sorting")),
    PublishedClaim(
        "Publishing by drift or cost chooses better moments", OURS, ("evidence.b.*",),
        ("b-changing", "b-conditions", "b-conditions-8"),
    ),
    PublishedClaim("The answers of others help", OURS, ("evidence.e.*",), ("e-sums",)),
    PublishedClaim("Shrunk advantages help small groups", OURS, ("evidence.g.*",), ("g-sums",)),
    PublishedClaim(
        "SmolLM2-135M: v = 10 and replay lose no more than 0.08", OURS, ("evidence.smollm2.*-loss",), ("smollm2",)
    ),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Return the verdicts so far, then the rows of other areas."""
    results = ROOT / "lab" / "results"
    files = sorted(results.glob("*.json"), key=lambda file: (file.stem != "evidence", file.stem))
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def claims_table() -> str:
    """Return one line for each claim, with all its verdicts; those that are open say so."""
    found = rows()
    lines = []
    for claim in CLAIMS:
        verdicts = [row for row in found if any(fnmatch(row["id"], pattern) for pattern in claim.rows)]
        lines.append([claim.text, claim.source, _verdicts(verdicts), _commands(claim.blocks)])
    return table(["claim", "said by", "verdicts, with mean and interval", "command"], lines)


def _verdicts(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"[{row['id'].removeprefix('evidence.')}](measured/{row['id'].partition('.')[0]}.md#{row['id']}): "
        f"{_measured(row)}, n = {row['n']}"
        for row in found
    ]
    if len(found) > 2:
        judged = [str(row["measured"]).partition(":") for row in found]  # a regret is a number
        words = Counter(word for word, colon, _ in judged if colon)
        lines.insert(0, "**" + ", ".join(f"{word}: {count}" for word, count in words.most_common()) + "**")
    return "<br>".join(lines) or OPEN


def _measured(row: dict[str, Any]) -> str:
    """Return a verdict with its numbers, or what was measured with its goal."""
    if row["id"].startswith("evidence."):
        return str(row["measured"])
    return f"{row['measured']} {row['unit']} (goal {row['goal']}, {'met' if row['holds'] else 'missed'})"


def _commands(blocks: Sequence[str]) -> str:
    commands = {"smollm2": "python -m lab.learning.evidence.smollm2"}
    commands |= {block: f"… sweep --block {block}" for block in BLOCKS}
    return "<br>".join(f"`{commands.get(block, block)}`" for block in blocks)


def lag_table() -> str:
    """Return one line for each objective of block a on the sums: its pass rate at v = 1, and what longer lags cost."""
    block = BLOCKS["a-sums"]
    cells = Cells(block, cell_rows(block.name))
    if block.count_missing(cells.done):
        return f"{OPEN}\n"
    verdicts = lag_verdicts(cells)
    by_loss = sorted(objectives_of(block), key=lambda name: -verdicts[f"{name} v{LAGS[1]}", f"{name} v1"].interval.mean)
    lines = [
        [name, str(Interval.of([*map(final, cells.of(f"{name} v1"))])), *(
            _lag_verdict(cells, f"{name} v{v}", verdicts[f"{name} v{v}", f"{name} v1"]) for v in LAGS[1:]
        )]
        for name in by_loss
    ]  # fmt: skip
    return table(["objective", "v = 1", *(f"v = {v}, minus v = 1" for v in LAGS[1:])], lines)


def _lag_verdict(cells: Cells, arm: str, verdict: Verdict) -> str:
    rate, drift = cells.of(arm)[0]["rate"], cells.drift(arm)
    under = f"lr {rate:g}" + ("" if drift is None else f", drift {drift:.3f}")
    word = verdict.word.split()[0]
    return f"[{word}](measured/evidence.md#{verdict.claim.id}): {verdict.numbers}<br><small>{under}</small>"


BUILDERS: Final[dict[str, Callable[[], str]]] = {"evidence": claims_table, "evidence-lag": lag_table}
