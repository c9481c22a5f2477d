"""The command line: `main.py` collects the commands, and `--help` imports nothing heavy.

start      init.py (also `quickstart`), check.py (also `explain`, `objectives`, `--set`), doctor.py (also `fsck`)
train      train.py (also `resume`, `worker`), eval_.py (also `score`)
data       log.py (also `import`, `feedback`)
look       report.py (also `view`, `export`)
shared     options.py (a log or run, `--task`, `--tokenizer`, refusals), terminal.py (printable text, errors)
"""
