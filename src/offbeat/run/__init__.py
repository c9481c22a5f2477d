"""The run: lockstep, concurrent or offline, in one loop.

the loop      loop.py (drawn at its top), parts.py, admission.py, desk.py, fleet.py, health.py
its books     directory.py, journal.py, live.py
one process   local.py with wiring.py, learner.py, evaluation.py
simulation    virtual_time.py
"""
