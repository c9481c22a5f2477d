"""The experience log: validated groups from any source, stored durably, and the sampler that draws batches from them.

write     log.py appends; validation.py checks, quarantine.py keeps what is refused, feedback.py has late scores,
          score_join.py joins them by ids
read      reader.py reads snapshots; catalog.py finds the row of each group, score_index.py its scores; ledger.py
          computes fates and totals, usage.py how often groups were trained on; index_files.py keeps the index of a run
store     schema.py defines the tables, rows.py converts groups to rows, lance_table.py is one table on Lance,
          background.py groups commits and compacts tables
sample    sampler.py draws batches from index.py's columns within limits; modes.py has the modes fresh, replay and
          offline
exchange  importing/ reads and writes files of other tools
"""
