"""Three steps of Qwen2.5-Coder-1.5B with an adapter on this machine: real vLLM, real logs, and all memory counted.

    python -m lab.lora.large    rows lora.5.large, lora.5.large-estimate and lora.5.large-run; a quarter of an hour

Memory is that of this process and all it started, pages that several share counted once, five times a second. After the
run, `offbeat fsck` reads everything that it wrote.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lab.bench.run_memory import listed, mebibytes
from lab.figures import Figure, command_parser, record
from lab.fixtures import qwen_coder
from offbeat.placement.hardware import cpu_products
from offbeat.sandbox.meter import descendants
from offbeat.types import Json
from tests.fixtures.forced_lengths import lottery, prompts
from tests.fixtures.memory import shared_bytes

STEPS: Final = 3
PROMPT, COMPLETION, GROUPS, SIZE = 48, 32, 2, 4
MOST: Final = 20 << 30
SETTINGS: Final[dict[str, Any]] = {
    "steps": STEPS,
    "prompts_per_step": GROUPS,
    "group_size": SIZE,
    "adapter": {"rank": 8},
    "objective": {"preset": "rec-oneside-nois"},
    "sampling": {"max_tokens": COMPLETION, "ignore_eos": True},
    "engine": {"kind": "vllm", "max_prompt_tokens": PROMPT, "threads": 2},
    "workers": {"count": 1, "groups_at_once": GROUPS},
    "trainer": {"token_budget": PROMPT + SIZE * COMPLETION, "checkpoint_activations": True},
    "evaluation": {"every": 0},
    "run": {"silence": 600.0},
}


@dataclass
class Peaks:
    """The largest memory seen so far, in bytes."""

    trainer: int = 0
    """Of this process."""
    all: int = 0
    """Of this process and all it started."""
    loading: int = 0
    """Of this process until its first event: while the model is read, the mapped file counts beside the weights."""
    kinds: list[str] = field(default_factory=list)
    """What happened in the run, in order."""

    def __call__(self, event: Mapping[str, Json]) -> None:
        """Note an event; a callback of `offbeat.train`."""
        self.loading = self.loading or self.trainer
        self.kinds.append(str(event["kind"]))
        print(
            f"{event['kind']} of step {event['step']}: {mebibytes(self.trainer)} of {mebibytes(self.all)}", flush=True
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample in a thread."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.2):
                own = shared_bytes(os.getpid())
                self.trainer = max(self.trainer, own)
                self.all = max(self.all, own + sum(map(shared_bytes, descendants(os.getpid()))))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def trained(place: Path) -> tuple[Peaks, int, list[str]]:
    """Train, and return the peaks, the memory after the imports, and what `offbeat fsck` finds damaged."""
    import vllm.v1.engine.async_llm  # noqa: F401  # isort: skip
    from transformers import AutoTokenizer

    import offbeat
    import offbeat.run.local
    from offbeat.run.directory import RunDirectory
    from offbeat.run.fsck.check import check_run

    model = str(qwen_coder.directory())
    rows = [{"prompt": text} for text in prompts(AutoTokenizer.from_pretrained(model), PROMPT, STEPS * GROUPS)]
    base, peaks = shared_bytes(os.getpid()), Peaks()
    with peaks.watching():
        offbeat.train(model, lottery, rows, out=place, progress=False, callbacks=[peaks], **SETTINGS)
    return peaks, base, [str(found) for found in check_run(RunDirectory(place)) if found.remedy is not None]


def main() -> bool:
    command_parser(__doc__).parse_args()
    from offbeat.config import parse
    from offbeat.preflight.forecast import ModelFiles, forecast

    with tempfile.TemporaryDirectory(prefix="offbeat-lab-", ignore_cleanup_errors=True) as scratch:
        peaks, base, damages = trained(Path(scratch, "run"))
    expected = forecast(parse(SETTINGS), ModelFiles(qwen_coder.directory()))
    terms = expected.trainer | {f"copy: {name}": size for name, size in expected.copies.items()}
    ratio = (base + sum(terms.values())) / peaks.trainer
    counts = {kind: peaks.kinds.count(kind) for kind in dict.fromkeys(peaks.kinds)}
    about = f"Qwen2.5-Coder-1.5B with an adapter of rank 8, {GROUPS} x {SIZE} x {PROMPT}+{COMPLETION} tokens"
    return record(
        Figure(
            "lora.5.large",
            f"peak memory of a run, trainer and vLLM together: {about}",
            "≤ 20",
            round(peaks.all / 2**30, 1),
            "GiB",
            peaks.all <= MOST,
            STEPS,
            f"the process that trains {mebibytes(peaks.trainer)}, of which {mebibytes(base)} after the imports; "
            f"trainer and vLLM multiply in {cpu_products('bfloat16')} here and hold the weights in it",
        ),
        Figure(
            "lora.5.large-estimate",
            f"memory that `offbeat check` estimates for the trainer, plus what imports take ÷ its peak: {about}",
            "0.85 to 1.15",
            round(ratio, 3),
            "×",
            0.85 <= ratio <= 1.15,
            STEPS,
            f"estimate {mebibytes(sum(terms.values()))} ({listed(terms)}) and {mebibytes(base)} after the imports, "
            f"peak {mebibytes(peaks.trainer)}; {mebibytes(peaks.loading)} while the model is read, when the mapped "
            "file counts beside the weights",
        ),
        Figure(
            "lora.5.large-run",
            f"steps taken, published and probed, with logs and books that `offbeat fsck` finds whole: {about}",
            f"{STEPS}",
            counts.get("step", 0),
            "steps",
            counts.get("step") == STEPS and not damages,
            STEPS,
            f"events: {', '.join(f'{number} {kind}' for kind, number in counts.items())}; "
            f"{'; '.join(damages) or 'fsck finds no damage'}",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
