"""What holds for all tests."""

import os

from hypothesis import settings

# Machines are shared and noisy: a slow example is not a wrong one. What must be fast has a test that measures it.
# In CI the same commit gets the same verdict; everywhere else each run looks at other examples.
settings.register_profile("offbeat", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.register_profile("thousand", settings.get_profile("offbeat"), max_examples=1100)  # for commands of the lab
settings.load_profile("offbeat")
