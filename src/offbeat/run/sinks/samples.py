"""The newest completions of a run as text, for tables in other tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.config import Config
from offbeat.experience.lance_table import exists
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory
from offbeat.types import Group, Score

Decoder = Callable[[Sequence[int]], str]
GROUPS: Final = 4
"""Groups in a table: enough to see what the policy does, and little to upload."""
COLUMNS: Final = ("step", "group", "prompt", "completion", "reward")


@dataclass(frozen=True)
class Sample:
    """One completion with its reward; None if it has none yet, or could not be scored."""

    step: int
    group: str
    prompt: str
    completion: str
    reward: float | None


class NewestSamples:
    """Reads the newest groups of a run's experience log."""

    def __init__(self, directory: RunDirectory, config: Config) -> None:
        self._directory, self._uri = directory, config.run.experience or str(directory.experience)
        self._reader: LogReader | None = None

    def read(self, step: int) -> list[Sample]:
        """Return the completions of the newest groups; in a log that several runs share, of this run's own if any."""
        if self._reader is None:
            if not exists(f"{self._uri.rstrip('/')}/groups.lance"):
                return []
            self._reader = LogReader.open(self._uri)
        size = self._reader.size()
        newest = self._reader.read(range(max(0, size - 8 * GROUPS), size))
        own = [group for group in newest if self._directory.name in group.id] or newest
        decode = decoder(self._directory.tokenizer)
        return [sample for group in own[-GROUPS:] for sample in _samples(step, group, decode)]


def _samples(step: int, group: Group, decode: Decoder) -> list[Sample]:
    prompt = decode(group.prompt.token_ids.tolist())
    return [
        Sample(
            step,
            group.id,
            prompt,
            decode(one.token_ids.tolist()),
            one.score.reward if isinstance(one.score, Score) else None,
        )
        for one in group.completions
    ]


def decoder(tokenizer: Path) -> Decoder:
    """Return a function from token ids to text; without a tokenizer file it prints the ids."""
    file = tokenizer / "tokenizer.json"
    if not file.exists():
        return lambda ids: "tokens " + " ".join(map(str, ids))
    from tokenizers import Tokenizer

    loaded: Tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))
