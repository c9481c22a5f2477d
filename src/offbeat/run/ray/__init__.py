"""A run on Ray. Only this package imports Ray, and only after `entry.environment` has set the environment.

entry.py     train on Ray, the environment that Ray reads at import, the command that joins a cluster (imports no Ray)
attempt.py   the connection to Ray, and one attempt at a run: from its actors' start until it ends or a rank is lost
driver.py    the driver's side of the actors: fleet members, the learner, restarts of scoring pools
actors.py    the actors: trainer rank, worker, scoring pool
"""

from typing import Final

WORKER_SLOT: Final = "offbeat_worker"
"""The Ray resource of a node that joins: one unit for each worker it has room for."""
