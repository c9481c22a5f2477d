"""Tasks: problems in a fixed shuffled order, and scores that are true, or not scores at all.

contract    task.py, with order.py, rewards.py, reference.py, registry.py, data.py, environment.py
the pool    scoring.py, with line.py, process.py, worker.py, channel.py, tally.py
answers     verify.py, with extract.py, numbers.py, latex.py, screen.py
programs    sandbox.py, with bubblewrap.py, jail.py, seccomp.py, cgroups.py, slots.py, conversation.py, inside.py
evaluation  evaluation.py
tasks       arithmetic.py, gsm8k.py, latex_math.py, reasoning_gym.py (reasoning_gym_entries.py),
            python_code.py (code_tests.py), custom.py
"""
