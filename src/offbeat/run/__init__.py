"""A run: lockstep, concurrent or offline, all in one loop.

the loop      loop.py (drawn at its top), protocols.py, admission.py, desk.py, drawing.py, fleet.py,
              cadence.py, health.py
its parts     build.py (from a configuration), engines.py, learner.py (the trainer), evaluation/
where it runs local.py (one process), ray/ (actors on a cluster)
its records   directory.py, journal.py, sinks/
quickstart.py the tiny model of `offbeat quickstart`
"""
