"""Tasks: examples in a shuffled order, and reward functions that score completions.

task.py           `Task`, its order of examples, the task names, and a task in your own file (`custom`)
data.py           `Example`, and loading examples from files and datasets
rewards.py        `Reward`, functions written for TRL, and the sum of several rewards
turns.py          episodes of several turns with an environment, and the example environment `Calculator`
arithmetic.py, gsm8k.py, latex_math.py, reasoning_gym.py, python_code.py (its tests: code_tests.py)
                  the tasks that come with offbeat
"""
