"""The trainer: groups in, an updated policy and its metrics out.

One step     trainer.py: i updates on B groups. It calls, in this order:
  faults.py      groups that no step can train on
  batch.py       groups to credit, credit to micro-batches, with every tensor that the loss reads
  forward.py     a micro-batch to log-probs; attention.py computes a shared prompt once per group
  first_look.py  gates over the whole batch, for objectives that have one
  optimizer.py   AdamW on float32 master weights: schedules and clipping
  measures.py    drift, gates and the improvement bound, from log-probs that the updates computed anyway
Many ranks   fsdp.py: parameters, gradients and moments sharded over ranks; whole weights for publishing
Checkpoints  checkpoint.py saves and restores them, checkpoint_files.py is their format, export.py a plain model
Before       estimate.py: memory and time of a step, estimated before the first one
"""
