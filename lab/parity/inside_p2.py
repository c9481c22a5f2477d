"""Run every row of `examples/p2_in_trl.py` end to end on a CPU: SmolLM2-135M, GSM8K, two steps, eight prompts.

    python -m lab.parity.inside_p2            10 minutes; writes row inside.3.p2
    python -m lab.parity.inside_p2 --short    one row, nothing recorded

GSM8K lies beside the repository, in shared/data. What the rows reach here means nothing: answers have 16 tokens.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, report
from lab.fixtures import smollm2
from offbeat.experience.reader import LogReader

DATA = ROOT.parent / "shared" / "data" / "gsm8k"


def main() -> bool:
    short = command_parser(__doc__, short="one row; record nothing").parse_args().short
    rows = ["v10-mask"] if short else ["v1", "v1-mask", "v10", "v10-mask", "i10", "i10-mask"]
    with tempfile.TemporaryDirectory() as out:
        options = ["--out", out, "--smoke", "--model", str(smollm2.directory()), "--data", str(DATA)]
        command = [sys.executable, "-W", "ignore", "examples/p2_in_trl.py", *options, "--rows", ",".join(rows)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        kept = [json.loads(line) for line in Path(out, "p2.jsonl").read_text(encoding="utf-8").splitlines()]
        logs = [sum(1 for _ in LogReader.open(Path(out, f"{name}-1", "run", "experience")).groups()) for name in rows]
    table = re.findall(r"^(\S+) +1 +\d\.\d{4}", done.stdout, re.M)
    ended = [one["row"] for one in kept if one["prompts"] == 8]
    right = sum(name in table and name in ended and groups == 4 for name, groups in zip(rows, logs, strict=True))
    what = "rows of P2 inside TRL that train, are logged, are evaluated and stand in the table, with --smoke"
    note = "SmolLM2-135M in float32 with transformers on a CPU; no GPU of ours has run the real table"
    held = right == len(rows)
    return report(
        short, Figure("inside.3.p2", what, f"{len(rows)} of {len(rows)}", right, "rows", held, len(rows), note)
    )


if __name__ == "__main__":
    sys.exit(not main())
