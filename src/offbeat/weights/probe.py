"""The probe: a few fixed sequences and the trainer's log-probs on them, stored with every version.

After a load, an engine computes log-probs of the same sequences and compares. Hashes prove that the bytes arrived; the
probe proves that the engine computes with them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import ProbeError
from offbeat.seeds import derive
from offbeat.types import Json

Sequences = tuple[tuple[int, ...], ...]
LENGTH: Final = 24
"""Tokens of a probe's sequences. An engine must be able to read one more."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Sequences of n tokens, each with the n − 1 log-probs of its tokens after the first, at temperature 1.

    >>> probe = Probe(((5, 9, 2),), ([-1.5, -0.25],))
    >>> probe.values, Probe.from_json(probe.to_json()).sequences
    (array([-1.5 , -0.25], dtype=float32), ((5, 9, 2),))
    """

    sequences: Sequences
    logprobs: tuple[NDArray[np.float32], ...]

    def __init__(self, sequences: Iterable[Iterable[int]], logprobs: Iterable[ArrayLike]) -> None:
        object.__setattr__(self, "sequences", tuple(tuple(int(token) for token in one) for one in sequences))
        object.__setattr__(self, "logprobs", tuple(np.asarray(one, np.float32) for one in logprobs))
        expected = [len(sequence) - 1 for sequence in self.sequences]
        found = [len(one) for one in self.logprobs]
        if not expected or min(expected) < 1 or expected != found:
            raise ProbeError(f"sequences of n tokens need n - 1 log-probs each: expected {expected}, found {found}")
        if not np.isfinite(self.values).all():
            raise ProbeError(
                "the log-probs of a probe must be finite, and these are not: the policy is broken. Do not publish it"
            )

    @property
    def values(self) -> NDArray[np.float32]:
        """The log-probs of all sequences, concatenated."""
        return np.concatenate(self.logprobs)

    def to_json(self) -> Json:
        """Return JSON for a manifest. float32 values survive exactly."""
        return {
            "sequences": [list(one) for one in self.sequences],
            "logprobs": [[float(value) for value in one] for one in self.logprobs],
        }

    @classmethod
    def from_json(cls, data: Json) -> "Probe":
        """Read what `to_json` returned."""
        try:
            fields = cast("dict[str, list[list[float]]]", data)
            return cls(cast("list[list[int]]", fields["sequences"]), fields["logprobs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProbeError(f"this is not a probe: {error!r}") from None


def probe_sequences(texts: Sequence[Sequence[int]], vocab_size: int, seed: int, length: int = LENGTH) -> Sequences:
    """Return the sequences of a probe: the given ones cut to `length`, and as many random ones.

    Real text shows what is served. Log-probs of random tokens react most to a change of weights, so they reveal small
    errors too.

    >>> [len(one) for one in probe_sequences([[3, 4, 5]], vocab_size=50, seed=0, length=8)]
    [3, 8]
    """
    rng = np.random.default_rng(derive(seed, "probe"))
    real = [tuple(text[:length]) for text in texts if len(text) > 1]
    random = [tuple(int(t) for t in rng.integers(0, vocab_size, length)) for _ in range(max(len(real), 1))]
    return (*real, *random)
