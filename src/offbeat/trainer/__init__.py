"""The trainer: groups in, an updated policy and a report out.

trainer.py    one step: i updates on B groups, readable aloud
batch.py      groups become credit, and micro-batches with every stream the loss reads
forward.py    tokens in, log-probs out: one row per group where the architecture allows it
attention.py  what a completion on such a row looks at
optimizer.py  AdamW on float32 master weights, schedules, clipping, the finite check
measures.py   drift, gates and the improvement bound, from log-probs that are there anyway
ranks.py      who computes which micro-batch when several processes train together
fsdp.py       parameters, gradients and moments spread over ranks; the policy's weights for publishing
launch.py     ranks on one machine: started, watched, and ended together when one is lost
checkpoint.py everything a run needs to go on bitwise; its files are in checkpoint_files, its pieces in checkpoint_state
export.py     a checkpoint as a plain Hugging Face directory
estimate.py   memory and time, told before the first step; live_bytes.py counts what lives
"""
