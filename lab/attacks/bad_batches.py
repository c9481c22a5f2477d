"""A thousand batches with everything that can be wrong with one: does the policy stay finite?

python -m lab.attacks.bad_batches      runs tests/trainer/test_bad_input.py and records what its batches came to
"""

import re
import subprocess
import sys

from lab.figures import ROOT, Figure, record

TEST = "tests/trainer/test_bad_input.py"
OUTCOMES = {"Trained": "trained", "Refused": "refused with reasons", "NoneType": "nothing to learn"}


def main() -> bool:
    """Must show 5."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "engine", "--hypothesis-show-statistics", TEST]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout)
    passing = re.search(r"(\d+) passing", run.stdout.split("generate phase")[-1])
    n = int(passing[1]) if passing else 0
    shares = re.findall(r"([\d.]+%), (Trained|Refused|NoneType)", run.stdout)
    said = ", ".join(f"{share} {OUTCOMES[outcome]}" for share, outcome in shares)
    return record(
        Figure(
            "trainer.5",
            "batches with NaN log-probs, absurd ratios, empty and one-token answers, equal rewards, prompts too long",
            "1,000 batches, policy finite, every refusal with its reason",
            f"{n} hold" if run.returncode == 0 else "fails",
            "batches",
            run.returncode == 0 and n >= 1000,
            n,
            f"{said}; all presets without a reference policy, one or two updates, lr 1e-2",
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
