"""Checks before a run.

checks.py    problems outside the configuration file: model, task, experience log, extras
forecast.py   the model's files, and memory and time estimated from them
doctor.py     what this machine has for offbeat, and how to fix what it lacks
gpu/          whether GPU kernels, ranks, engines and copies work here, tried out
"""
