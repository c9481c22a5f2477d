"""Checks before a run.

checks.py     problems outside the configuration file: model, task, log, your own parts, extras
forecast.py   memory and time, estimated from the model's files and the data
doctor.py     what this machine has for offbeat, and how to fix what it lacks
gpu_session.py, gpu_run.py    what a run on a GPU needs, tried out by `offbeat doctor --gpu`
"""
