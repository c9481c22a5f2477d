"""Sums with answers of 16 digits."""

from typing import Final

from lab.learning.evidence.padded.sums import padded

task: Final = padded(16)
