"""A run with both logs in memory learns what `offbeat train` learns, digit by digit."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from lab.learning.evidence import cells
from lab.learning.evidence.blocks import BLOCKS, Block
from lab.lora.learning import BLOCK as ADAPTERS
from offbeat.config import Config
from offbeat.run.directory import RunDirectory
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.types import Json


def train_on_disk(
    config: Config, place: Path, *, started: Callable[[Loop], None], watching: Callable[[Mapping[str, Json]], None]
) -> None:
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory, started=started, watching=watching)
    assert (place / "experience").is_dir() and (place / "weights").is_dir()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("block", "arm"),
    [
        (BLOCKS["a-sums"], "grpo v5"),
        (BLOCKS["d-sums"], "replay"),
        (BLOCKS["f-sums"], "with refill"),
        (BLOCKS["g-sums"], "shrunk G2"),
        (ADAPTERS, "rank 8"),
    ],
)
def test_a_cell_in_memory_equals_the_run_with_logs_on_disk(
    block: Block, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    task, settings, rate = block.task, block.arm(arm), block.arm(arm).rates[2]
    in_memory = cells.run(task, settings, rate, seed=1, steps=15)
    monkeypatch.setattr(cells, "train_in_memory", train_on_disk)
    on_disk = cells.run(task, settings, rate, seed=1, steps=15)
    assert in_memory | {"seconds": 0} == on_disk | {"seconds": 0}
    assert in_memory["curve"][-1] > in_memory["curve"][0] and in_memory["groups"][-1] > 0
