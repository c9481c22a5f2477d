"""`offbeat fsck`: reads everything in a run directory, says what is whole, and repairs what can be repaired.

    files.py          config.json, environment.json, events.jsonl, index/, tokenizer/
    checkpoints.py    checkpoints/, every byte, by sha256
    logs.py           experience/: every row, digests, the ledger and the record; weights/: every version, by sha256
    check.py          all of them, in the order in which a repair of one helps the next

Looking changes nothing. A repair never removes what is whole: it sets aside, or writes again what another part of the
run still holds. What only a person can restore is named with its file.
"""
