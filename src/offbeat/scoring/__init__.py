"""The scoring pool runs reward functions in processes that can be killed.

pool.py        `ScoringPool`: the queue, one thread per worker, deadlines, restarts
blame.py       who caused a failure: the answer or the grader
process.py     a worker process as the pool sees it: start, ask, kill
supervisor.py  the process around it, which ends everything that a reward function has started
worker.py      the code in that process, and the JSON channel between both
tally.py       counts, slowest and failing completions, and the limit on failures
"""
