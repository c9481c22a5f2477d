"""What holds for all tests."""

from hypothesis import settings

# Machines are shared and noisy: a slow example is not a wrong one. What must be fast has a test that measures it.
settings.register_profile("offbeat", deadline=None, print_blob=True)
settings.load_profile("offbeat")
