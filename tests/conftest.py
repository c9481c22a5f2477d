"""What holds for all tests."""

import os
import shutil
from collections.abc import Generator

import pytest
from hypothesis import settings

from offbeat.errors import SandboxMissing

collect_ignore = ["fixtures"]  # neither tests nor doctests; some need packages of the lab

# Machines are shared and noisy: a slow example is not a wrong one. What must be fast has a test that measures it.
# In CI the same commit gets the same verdict; everywhere else each run looks at other examples.
settings.register_profile("offbeat", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile("thousand", settings.get_profile("offbeat"), max_examples=1100)  # for commands of the lab
settings.load_profile("offbeat")


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
