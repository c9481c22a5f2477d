"""The weight log: numbered policies, published once, read by any number of readers, each provably what was published.

publisher.py    the writing end: streams tensors to the host, writes patches and anchors, commits, retires
subscriber.py   the reading end: finds the shortest way to a version and verifies every byte
manifest.py     the file that makes a version exist
delta.py        tensors as bit patterns, and patches between two states
anchor.py       whole states as safetensors files
retention.py    reader leases, pins, and which versions may be removed
adapter.py      adapters: the state of a run that trains A and B beside a frozen base
probe.py        sequences with log-probs, on which an engine checks itself after loading
"""
