"""The changing task for runs with 8 prompts in a step."""

from typing import Final

from lab.learning.evidence.changing import changing

task: Final = changing(8)
