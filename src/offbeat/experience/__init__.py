"""The experience log: groups from anyone, kept, versioned, counted, never lost.

`log.py` is the way in and out, `door.py` decides what enters, `feedback.py` brings scores that come late, `ledger.py`
says what became of every group, `sampler.py` and `packing.py` turn what is stored into micro-batches.
"""
