"""Sentences about one run: what it learned, and where it stands."""

from offbeat.reports.history import RunHistory, RunState
from offbeat.reports.live import bottleneck
from offbeat.reports.record import RunRecord
from offbeat.words import capitalized, count


def conclusion(run: RunRecord) -> str:
    """Return the sentence at the top of a report."""
    history = run.history
    if not history.steps:
        return f"No step is complete yet (state: {run.state})."
    steps, publishes = count(history.last_step, "step"), count(len(history.updates), "publish", "publishes")
    parts = [f"{learned(history)} in {steps}" + (f" with {publishes}" if run.generates else "")]
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
    evaluated = f"the only pass@1 is {rates[0][0]:.2f}" if rates else "no evaluations"
    return f"training reward went from {first_tenth:.2f} to {last_tenth:.2f} ({evaluated})"


def progress(run: RunRecord) -> str:
    """Return the state of a run, its step, and how to continue it."""
    at = f"at step {run.history.last_step} of {run.steps}"
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
