"""Evaluation: rates.py measures the policy during a run, with the leases of leases.py; model.py measures any model."""
