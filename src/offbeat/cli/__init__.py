"""The command line: `main.py` collects the commands, and `--help` imports nothing heavy.

start      quickstart.py, init.py, check.py (also `--set`), doctor.py, explain.py (also `objectives`)
train      train.py (also `resume`), worker.py, eval_.py, export.py
data       import_.py, feedback.py, log.py, score.py
look       report.py, view.py
shared     task_option.py (`--task`, `--tokenizer`, stored groups as text), log_options.py (a log or a run directory,
           refusals), terminal.py (printable text, errors)
"""
