"""Settings that `OffPolicyGRPOTrainer` refuses, each with a part of its sentence; run by test_hosts.py in a process."""

import sys
import tempfile
from pathlib import Path

from offbeat.errors import OffbeatError

CASES = {
    "first look": ({"preset": "m2po"}, "looks at the whole batch"),
    "misspelled": ({"preset": "grpo_off_policy"}, "did you mean 'grpo-off-policy'?"),
    "loss type": ({"loss_type": "dr_grpo"}, 'preset="dr-grpo"'),
    "clip": ({"epsilon": 0.3}, "epsilon: the preset decides this"),
    "every 0": ({"sync_every": 0}, "sync_every = 0 must be a whole number"),
    "every text": ({"sync_every": "10"}, "sync_every = '10' must be a whole number"),
    "share 1": ({"replay": 1.0}, "replay_share = 1.0 must be at least 0 and below 1"),
    "share too small": ({"replay": 0.1}, "of 4 groups a process, that is none or all"),
    "budget": ({"replay": 0.5, "reuse_budget": 1}, "reuse_budget = 1 must be at least 2"),
    "lag": ({"replay": 0.5, "max_replay_lag": -1}, "max_replay_lag = -1 must be at least 0"),
    "sampling": ({"top_p": 0.9}, "top_p: transformers then samples from another distribution"),
}


def main() -> None:
    from examples.inside_trl import train  # here, because TRL warns at import

    with tempfile.TemporaryDirectory() as place:
        for number, (name, (settings, sentence)) in enumerate(CASES.items()):
            given = {"preset": "grpo", "sync_every": 2} | settings
            try:
                train(Path(place) / str(number), **given)  # type: ignore[arg-type]
            except OffbeatError as error:
                assert sentence in str(error), f"{name}: {error}"
            else:
                raise SystemExit(f"{name} was not refused")
        train(Path(place) / "twice", preset="grpo", sync_every=2, steps=1)
        try:
            train(Path(place) / "twice", preset="grpo", sync_every=2, steps=1)
        except OffbeatError as error:
            assert "already holds a run: continue it from trl's checkpoint" in str(error), error
    print(f"{len(CASES) + 1} refused")


if __name__ == "__main__":
    sys.exit(main())
