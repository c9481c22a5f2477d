"""The weight log: numbered policies, published once, read by anyone, each provably what was published.

both ends   log.py with host_copy.py (the publisher), subscription.py (readers), with manifest.py, errors.py
bytes       bits.py (tensors as bit patterns), delta.py (patches), anchor.py (whole states as safetensors)
storage     store.py (a local path), object_store.py (S3 and the like)
clean-up    retention.py (what may go), leases.py (who still needs what)
beside it   probe.py (what an engine checks itself against), cadence.py (when to publish)
"""
