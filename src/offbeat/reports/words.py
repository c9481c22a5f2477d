"""Sentences about a run, numbers with units, and text made safe to display."""

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from offbeat.reports.history import RunHistory, RunState
from offbeat.reports.live import bottleneck
from offbeat.reports.record import RunRecord

MAX_REPEATS: Final = 3
"""A longer run of one escaped character is written once, with a count."""
MAX_MARKS: Final = 4
"""Combining marks on one letter; no writing system needs more."""


def conclusion(run: RunRecord) -> str:
    """Return the sentence at the top of a report."""
    history = run.history
    if not history.steps:
        return f"No step is complete yet (state: {run.state})."
    steps, publishes = count(history.last_step, "step"), count(len(history.updates), "publish", "publishes")
    parts = [f"{learned(history)} in {steps} with {publishes}"]
    parts.append(bottleneck(history.seconds).split(":")[0] if history.seconds else "time not measured")
    parts.append("the ledger does not balance" if run.imbalance else "the ledger balances")
    if run.state is not RunState.FINISHED:
        parts.append(progress(run))
    return capitalized("; ".join(parts)) + "."


def learned(history: RunHistory) -> str:
    """Return the change in pass@1 if there are two evaluations, otherwise the change in training reward.

    >>> learned(RunHistory())
    'nothing measured'
    """
    _, rates = history.pass_rates()
    if len(rates) > 1:
        first, last = rates[0], rates[-1]
        if last[1] > first[2]:
            return f"pass@1 rose from {first[0]:.2f} to {last[0]:.2f}"
        if last[2] < first[1]:
            return f"pass@1 fell from {first[0]:.2f} to {last[0]:.2f}"
        return f"pass@1 did not change beyond chance ({first[0]:.2f}, then {last[0]:.2f})"
    _, rewards = history.series("reward_mean")
    if not rewards:
        return "nothing measured"
    tenth = max(1, len(rewards) // 10)
    first_tenth, last_tenth = (sum(some) / tenth for some in (rewards[:tenth], rewards[-tenth:]))
    return f"training reward went from {first_tenth:.2f} to {last_tenth:.2f} (no evaluations)"


def progress(run: RunRecord) -> str:
    """Return the state of a run, its step, and how to continue it."""
    at = f"at step {run.history.last_step} of {run.config.steps}"
    match run.state:
        case RunState.RUNNING:
            return f"still running, {at}"
        case RunState.PAUSED:
            return f"paused {at} (remove the file ‘pause’ to continue)"
        case RunState.STOPPED:
            return f"stopped {at}: {run.history.ended}"
        case RunState.CRASHED:
            return f"crashed {at} (‘offbeat resume’ continues from the last checkpoint)"
        case RunState.FINISHED:
            return f"finished {at}"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def capitalized(text: str) -> str:
    """Capitalize the first letter and nothing else. `pass@1` is a name and stays."""
    return text if text.startswith("pass@") else text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """Return a duration with units.

    >>> duration(0.25), duration(42.3), duration(200), duration(7300)
    ('0.2 s', '42 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(number: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(512), size(59448), size(2.5e9)
    ('512 B', '59.4 kB', '2.5 GB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"


def signed(value: float | None) -> str:
    """Return a number with its sign.

    >>> signed(0.5), signed(-0.5), signed(None)
    ('+0.50', '−0.50', 'none')
    """
    return "none" if value is None else f"{value:+.2f}".replace("-", "−")


def visible(text: str) -> str:
    """Return text that is safe to display on a page and in a terminal. Newlines stay.

    >>> visible("42\\x07"), visible("42" + "\\x00" * 500)
    ('42\\\\x07', '42\\\\x00×500')
    """
    return "".join(piece for piece, _ in escaped_pieces(text))


def escaped_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Split text into pieces, each with True if it is unchanged and False if it is escaped.

    Control characters, direction marks and combining marks stacked on one letter (they would cover the lines above)
    are escaped.

    >>> list(escaped_pieces("42\\x1b[2J\\u202e\\nnext"))
    [('42', True), ('\\\\x1b', False), ('[2J', True), ('\\\\u202e', False), ('\\nnext', True)]
    """
    for safe, characters in groupby(zip(text, _is_safe(text), strict=True), lambda pair: pair[1]):
        piece = "".join(c for c, _ in characters)
        yield (piece if safe else "".join(_escape(c, len(list(same))) for c, same in groupby(piece))), safe


def _escape(character: str, times: int) -> str:
    escape = ascii(character)[1:-1]
    return escape * times if times <= MAX_REPEATS else f"{escape}×{times}"


def _is_safe(text: str) -> Iterator[bool]:
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.category(c) in ("Mn", "Me") else 0
        yield (c.isprintable() or c == "\n") and marks <= MAX_MARKS


def truncate(text: str, limit: int) -> tuple[str, int]:
    """Return at most `limit` characters, and how many were removed."""
    return text[:limit], max(0, len(text) - limit)
