"""How often each fault happens in a simulated run, and the seconds that a worker waits."""

import random
from dataclasses import dataclass

LEASE_SECONDS = 20.0
CALL_SECONDS = 1000.0
"""Longer than three slow completions, one after the other."""


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault, drawn from the seed of the schedule."""

    engine_dies: float = 0.0
    worker_dies: float = 0.0
    """The process of a worker ends during a call."""
    answer_lost: float = 0.0
    """The answer of the desk to a worker is lost: the leases stay taken until their deadline."""
    finish_lost: float = 0.0
    deaf: float = 0.0
    """An engine ignores its loads."""
    refusal: float = 0.0
    nothing_to_teach: float = 0.0
    slow: float = 0.0
    """A completion takes ten times its lease, and sometimes hangs until it is cancelled."""
    driver_dies: float = 0.0
    renewal_lost: float = 0.0

    @classmethod
    def of(cls, rng: random.Random) -> "FaultRates":
        def some(most: float) -> float:
            return rng.choice([0.0, rng.uniform(0, most)])

        return cls(some(0.1), some(0.05), some(0.1), some(0.1), some(0.1), some(0.1), some(0.1), some(0.2), some(0.05),
                   some(0.1))  # fmt: skip
