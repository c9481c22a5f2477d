"""The trainer: groups in, an updated policy and its metrics out.

One step     trainer.py: i updates on B groups. It calls, in this order:
  batch.py       groups that can be trained on, their credit, and micro-batches with every tensor that the loss reads
  forward.py     a micro-batch to log-probs; attention.py computes a shared prompt once per group, on GPUs flex.py
  optimizer.py   AdamW on float32 master weights: schedules, clipping and dithered masters
  measures.py    drift, gates and the improvement bound, from log-probs that the updates computed anyway
Many ranks   fsdp.py: parameters, gradients and moments sharded over ranks; whole weights for publishing
Model        loading.py reads it, whole or in slices; adapter.py puts an adapter into it
Checkpoints  checkpoint.py saves and restores them, export.py makes a plain model of one
Before       memory.py: the largest micro-batch, computed once before the first step
"""
