"""offbeat inside trainers of others: its objectives, its log and its figures by lag, through the hooks that they have.

objectives.py  which presets a hook can serve, and why it refuses the others
rows.py        rows of a host and groups, each as the other
books.py       the run directory of a run inside a host: groups written and drawn again, figures by step
losses.py      a preset as the loss of a host
trl.py         TRL: `OffPolicyGRPOTrainer`, a subclass of its `GRPOTrainer`; trl_async.py for its asynchronous trainer
verl.py        verl: losses and advantage estimators; verl_trainer.py: its trainers with a run directory
trinity.py     Trinity-RFT: a loss, an advantage and an operator

A host is imported by its own module alone. All of them need torch; `books` also needs what the extra `log` brings.
"""
