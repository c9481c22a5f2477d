"""What a run comes to, in one sentence."""

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from offbeat.report.history import RunHistory, RunState
from offbeat.report.live import verdict
from offbeat.report.record import RunRecord

MOST_ALIKE: Final = 3
MOST_MARKS: Final = 4
"""On one letter; no writing system needs more."""


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Runs of the text, each with whether it is plain; control characters and direction marks are spelled out.

    So are marks that would be piled on one letter until they cover the lines above. The same many times over is
    counted.

    >>> list(pieces("42\\x1b[2J\\u202e\\nnext"))
    [('42', True), ('\\\\x1b', False), ('[2J', True), ('\\\\u202e', False), ('\\nnext', True)]
    """
    for plain, run in groupby(zip(text, _plain(text), strict=True), lambda pair: pair[1]):
        written = "".join(c for c, _ in run)
        yield (written if plain else "".join(_spelled(c, len(list(same))) for c, same in groupby(written))), plain


def _spelled(character: str, times: int) -> str:
    """Its escape, and how often, where that is shorter."""
    name = ascii(character)[1:-1]
    return name * times if times <= MOST_ALIKE else f"{name}×{times}"


def _plain(text: str) -> Iterator[bool]:
    """Of each character."""
    marks = 0
    for c in text:
        marks = marks + 1 if unicodedata.category(c) in ("Mn", "Me") else 0
        yield (c.isprintable() or c == "\n") and marks <= MOST_MARKS


def visible(text: str) -> str:
    """The whole text, harmless in a page and in a terminal; lines stay lines.

    >>> visible("42\\x07"), visible("42" + "\\x00" * 500)
    ('42\\\\x07', '42\\\\x00×500')
    """
    return "".join(piece for piece, _ in pieces(text))


def cut(text: str, most: int) -> tuple[str, int]:
    """At most so many characters, and how many were left out.

    >>> cut("abcdef", 4), cut("abc", 4)
    (('abcd', 2), ('abc', 0))
    """
    return text[:most], max(0, len(text) - most)


def conclusion(run: RunRecord) -> str:
    """The sentence at the top of a report."""
    history = run.history
    if not history.steps:
        return f"No step has been made yet: the run is {run.state}."
    steps, publishes = history.last_step, sum(one.version > 0 for one in history.publishes)
    parts = [f"{learned(history)} in {_count(steps, 'step')} with {_count(publishes, 'publish', 'publishes')}"]
    parts.append(verdict(history.seconds).split(":")[0] if history.seconds else "time not measured")
    parts.append("the books do not balance" if run.imbalance else "books balance")
    if run.state is not RunState.FINISHED:
        parts.append(standing(run))
    return "; ".join(parts) + "."


def learned(history: RunHistory) -> str:
    """From where to where: by evaluations if there are two, otherwise by training reward.

    >>> learned(RunHistory())
    'Nothing measured'
    """
    measured = [(one.step, one.estimates["pass@1"]) for one in history.evaluations if "pass@1" in one.estimates]
    if len(measured) > 1:
        (_, first), (_, last) = measured[0], measured[-1]
        if last[1] > first[2]:
            return f"Learned from {first[0]:.2f} to {last[0]:.2f} (pass@1)"
        if last[2] < first[1]:
            return f"Lost pass@1 from {first[0]:.2f} to {last[0]:.2f}"
        return f"No change beyond chance: pass@1 {first[0]:.2f}, then {last[0]:.2f},"
    _, rewards = history.series("reward_mean")
    if not rewards:
        return "Nothing measured"
    tenth = max(1, len(rewards) // 10)
    first_tenth, last_tenth = (sum(some) / tenth for some in (rewards[:tenth], rewards[-tenth:]))
    return f"Training reward from {first_tenth:.2f} to {last_tenth:.2f} (no evaluations)"


def standing(run: RunRecord) -> str:
    """How far a run that is not finished has come.

    A stopped run's reason is in its journal; one that was killed left none.
    """
    at = f"at step {run.history.last_step} of {run.config.steps}"
    match run.state:
        case RunState.RUNNING:
            return f"still running, {at}"
        case RunState.PAUSED:
            return f"paused {at} (remove the file ‘pause’ to let it go on)"
        case RunState.STOPPED:
            return f"stopped {at}: {run.history.ended}"
        case RunState.BROKEN_OFF:
            return f"broken off {at} (‘offbeat resume’ goes on from its last checkpoint)"
        case RunState.FINISHED:
            return f"finished {at}"


def duration(seconds: float) -> str:
    """For people.

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


def size(count: float) -> str:
    """Bytes for people.

    >>> size(512), size(59448), size(2.5e9)
    ('512 B', '59.4 kB', '2.5 GB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"


def signed(value: float | None) -> str:
    """With its sign.

    >>> signed(0.5), signed(-0.5), signed(None)
    ('+0.50', '−0.50', 'none')
    """
    return "none" if value is None else f"{value:+.2f}".replace("-", "−")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
