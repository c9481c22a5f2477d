"""Durable storage: local folders and object stores behind one protocol. Logs and checkpoints stand on it."""
