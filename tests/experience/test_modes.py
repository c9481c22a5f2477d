from collections.abc import Callable

import pytest

from offbeat.experience.limits import SamplerLimits
from offbeat.experience.modes import Offline, Replay


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: SamplerLimits(batch=0), "batch = 0"),
            (lambda: SamplerLimits(batch=1, max_lag=-1), "max_lag = -1"),
            (lambda: Replay(share=0.0), "share = 0.0"),
            (lambda: Replay(share=1.5), "share = 1.5"),
            (lambda: Replay(reuse_budget=1), "reuse_budget = 1"),
            (lambda: Replay(cooldown=-1), "cooldown = -1"),
            (lambda: Offline(epochs=0), "epochs = 0"),
            (lambda: Offline(cooldown=-1), "cooldown = -1"),
        ],
    )
    def test_invalid_settings_are_named_in_the_error(self, make: Callable[[], object], words: str):
        with pytest.raises(ValueError, match=words):
            make()
