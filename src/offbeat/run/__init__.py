"""The run: lockstep, concurrent or offline, in one loop.

the loop      loop.py (drawn at its top), parts.py, admission.py, desk.py, fleet.py, health.py
its parts     wiring.py (from a configuration), assembly.py (put together), learner.py, evaluation.py
one process   local.py
on Ray        cluster.py (drawn at its top), cluster_session.py, cluster_run.py, cluster_actors.py, cluster_members.py
its books     directory.py, journal.py, sinks.py, live.py
before it     preflight.py, model_files.py, forecast.py, diagnosis.py, engine_trial.py, extras.py, quickstart.py
simulation    virtual_time.py
"""
