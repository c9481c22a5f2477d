"""How good is it? Pass rates and their 95 % intervals.

table.py       pass@1, pass@k and maj@k of attempts at prompts, in one table; before and after, compared
intervals.py   intervals over prompts
"""

from offbeat.evaluation.intervals import RateEstimate
from offbeat.evaluation.table import Attempts, EvaluationRow, evaluate, maj_at_k, majority, pass_at_k

__all__ = ["Attempts", "EvaluationRow", "RateEstimate", "evaluate", "maj_at_k", "majority", "pass_at_k"]
