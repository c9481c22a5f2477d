"""The experience log: validated groups from any source, stored durably, and the sampler that draws batches from them.

write     log.py appends; validation.py checks and quarantines what is refused; feedback.py has late scores, and
          score_join.py joins them by ids
read      reader.py reads snapshots; catalog.py finds the row of each group and its scores; ledger.py computes fates and
          how often groups were trained on; index_files.py keeps the index of a run
store     schema.py defines the tables and converts groups to rows, lance_table.py is one table on Lance,
          background.py groups commits and compacts tables
sample    sampler.py draws batches from index.py's columns within limits; modes.py has the modes fresh, replay and
          offline; priors.py counts what drawn groups say about prompts
exchange  importing/ reads and writes files of other tools
"""
