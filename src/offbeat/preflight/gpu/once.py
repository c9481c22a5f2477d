"""Before the first run on a GPU: check the machine, and keep the result until GPUs, driver or versions change."""

import json
import os
from collections.abc import Callable

from offbeat.errors import RunError
from offbeat.placement.hardware import Hardware
from offbeat.preflight.gpu.child import SKIP
from offbeat.preflight.gpu.machine import describe_machine, result_file
from offbeat.preflight.gpu.session import DoctorSession


def require_checked_gpu(say: Callable[[str], None]) -> None:
    """Run all checks if there is a GPU and no passed result for it; raise `RunError` if something is broken.

    A broken machine is checked again before the next run, because its fault may have been fixed meanwhile.
    """
    if os.environ.get(SKIP) or Hardware.detect() is None:
        return
    if _has_passed():
        return
    say("first run on this GPU: checking kernels, ranks, engines and copies; this takes a few minutes, once")
    session = DoctorSession("cuda")
    for finding in session.run():
        say(str(finding))
    kept = session.keep()
    if broken := [finding for finding in session.findings if finding.broken]:
        lines = "\n".join(str(finding) for finding in broken)
        raise RunError(
            f"this machine is not ready for a run on its GPUs:\n{lines}\nThe report for an issue is {kept}. To train "
            f"anyway, set {SKIP}=1"
        )


def _has_passed() -> bool:
    path = result_file(describe_machine("cuda"))
    try:
        return json.loads(path.read_text(encoding="utf-8"))["passed"] is True
    except (OSError, ValueError, KeyError, TypeError):  # never checked, or the file is damaged
        return False
