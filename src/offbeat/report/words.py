"""What a run comes to, in one sentence."""

from offbeat.report.history import History, State
from offbeat.report.record import Record
from offbeat.run.live import verdict


def conclusion(run: Record) -> str:
    """The sentence at the top of a report."""
    history = run.history
    if not history.steps:
        return f"No step has been made yet: the run is {run.state}."
    steps, publishes = history.last_step, sum(one.version > 0 for one in history.publishes)
    parts = [f"{learned(history)} in {_count(steps, 'step')} with {_count(publishes, 'publish', 'publishes')}"]
    parts.append(verdict(history.seconds).split(":")[0] if history.seconds else "time not measured")
    parts.append("the books do not balance" if run.imbalance else "books balance")
    if run.state is not State.FINISHED:
        parts.append(standing(run))
    return "; ".join(parts) + "."


def learned(history: History) -> str:
    """From where to where: by evaluations if there are two, otherwise by training reward.

    >>> learned(History())
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


def standing(run: Record) -> str:
    """How far a run that is not finished has come.

    A stopped run's reason is in its journal; one that was killed left none.
    """
    at = f"at step {run.history.last_step} of {run.config.steps}"
    match run.state:
        case State.RUNNING:
            return f"still running, {at}"
        case State.PAUSED:
            return f"paused {at} (remove the file ‘pause’ to let it go on)"
        case State.STOPPED:
            return f"stopped {at}: {run.history.ended}"
        case State.BROKEN_OFF:
            return f"broken off {at} (‘offbeat resume’ goes on from its last checkpoint)"
        case State.FINISHED:
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
