"""Tests of offbeat, and what they share with the lab."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The root of the repository."""
