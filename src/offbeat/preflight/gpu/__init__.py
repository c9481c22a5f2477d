"""`offbeat doctor --gpu`: does everything that a run on a GPU needs work on this machine?

finding.py     the result of a check, and the text of a report without private paths
session.py     runs the checks in a process of their own, one unit after another, and writes the report
once.py        before the first run on a GPU: run the checks, keep the result
machine.py     what the machine is: GPUs, driver, versions; and the directory of kept results
child.py       a process that calls a function and reports in JSON lines
models.py      the tiny models and groups of the checks
attention.py   flex_attention on packed rows against plain rows
ranks.py       a step of two ranks against one
engines.py     vLLM: loads, sleep and wake, death of its owner; engine_trial.py is what an engine must show
copies.py      bandwidths of host, device, disk and shared memory
training.py    a training run of three steps; counting.py is its task

Each check takes a device. On `cpu` the same code runs without a GPU, which is how it is tested.
"""
