"""The experience log: groups from anyone, kept, versioned, counted, never lost.

in and out  log.py and reader.py, with door.py, reasons.py, quarantine.py, feedback.py
storage     schema.py, rows.py, table.py, tables.py, commits.py, catalog.py, maintenance.py
accounts    ledger.py, stats.py
sampling    sampler.py, with index.py, history.py, modes.py, priorities.py
batches     packing.py
files       importer.py, with exchange/
"""
