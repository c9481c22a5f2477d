"""What holds for all tests."""

import os
import shutil
import time
from collections.abc import Generator

import pytest
from hypothesis import settings

from offbeat.errors import SandboxMissing

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


def _skip_without_bubblewrap() -> Generator[None, object, object]:
    """Skip what needs the sandbox where it is not installed; the reason has the command. CI installs it."""
    try:
        return (yield)
    except SandboxMissing as missing:
        if "CI" in os.environ or shutil.which("bwrap"):
            raise
        pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    return (yield from _skip_without_bubblewrap())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skip_without_bubblewrap())
