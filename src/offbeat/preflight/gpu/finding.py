"""The result of one check of `offbeat doctor --gpu`. No torch."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.preflight.doctor import Finding, FindingState
from offbeat.types import Json

ATTACH = "attach the report (`offbeat doctor --gpu --json doctor.json`) to an issue"


@dataclass(frozen=True)
class GpuFinding(Finding):
    """A finding with its time and its numbers.

    >>> print(GpuFinding("copies", FindingState.OK, "host to device 24 GB/s", seconds=1.25))
    ok       copies (1.2 s): host to device 24 GB/s
    """

    seconds: float = 0.0
    numbers: Mapping[str, Json] = field(default_factory=dict)
    log: str = ""
    """The last lines that a broken check printed."""

    def __str__(self) -> str:
        line = f"{self.state:7}  {self.what} ({self.seconds:.1f} s): {self.detail}"
        return f"{line}\n           fix: {self.fix}" if self.fix else line

    @property
    def broken(self) -> bool:
        return self.state is FindingState.BROKEN

    def to_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {
            "what": self.what,
            "state": self.state.value.lower(),
            "seconds": round(self.seconds, 2),
            "detail": without_paths(self.detail),
            "fix": self.fix,
            "numbers": dict(self.numbers),
        }
        return found | ({"log": without_paths(self.log)} if self.log else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "GpuFinding":
        """Read what `to_json` returned."""
        state = next(one for one in FindingState if one.value.lower() == data["state"])
        rest = {name: data[name] for name in ("what", "detail", "fix", "seconds", "numbers")}
        return cls(**rest, state=state, log=data.get("log", ""))


def passed(what: str, detail: str, **numbers: Json) -> GpuFinding:
    return GpuFinding(what, FindingState.OK, detail, numbers=numbers)


def broken(what: str, detail: str, fix: str = ATTACH, **numbers: Json) -> GpuFinding:
    return GpuFinding(what, FindingState.BROKEN, detail, fix, numbers=numbers)


def skipped(what: str, why: str, **numbers: Json) -> GpuFinding:
    return GpuFinding(what, FindingState.SKIPPED, why, numbers=numbers)


def without_paths(text: str) -> str:
    """Return the text without the paths of this user.

    >>> without_paths(f"{Path.home()}/runs/one/config.json is missing")
    '~/runs/one/config.json is missing'
    """
    places = {sys.prefix: "<environment>", os.getcwd(): ".", tempfile.gettempdir(): "<tmp>", str(Path.home()): "~"}
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if place != "/":
            text = text.replace(place, name)
    return text
