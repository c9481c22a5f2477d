"""What holds for all tests."""

import os
import time

import pytest
from hypothesis import settings

ENGINE_TESTS_END = float(os.environ.get("OFFBEAT_ENGINE_TESTS_END", "inf"))
"""Seconds since 1970 after which no test with an engine begins. CI sets it: a verdict that comes too late is none."""

# Machines are shared and noisy: a slow example is not a wrong one. What must be fast has a test that measures it.
# In CI the same commit gets the same verdict; everywhere else each run looks at other examples.
settings.register_profile("offbeat", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile("thousand", settings.get_profile("offbeat"), max_examples=1100)  # for commands of the lab
settings.load_profile("offbeat")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("engine") and time.time() > ENGINE_TESTS_END:
        pytest.skip("not reached: the time for tests with engines is up")
