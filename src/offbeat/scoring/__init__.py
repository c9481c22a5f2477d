"""The scoring pool runs reward functions in processes that can be killed.

pool.py     `ScoringPool`: a queue of completions, one thread per worker, deadlines and restarts
process.py  a worker process as the pool sees it: start, ask, kill
worker.py   the code in that process, and the JSON channel between both
tally.py    counts, slowest and failing completions, and the limit on failures
"""
