"""Everything that runs before a run: preflight checks, memory and time estimates, doctor."""
