"""Train on a thousand broken batches: does the policy stay finite?

python -m lab.attacks.bad_batches    runs tests/trainer/test_bad_input.py; writes row trainer.5; about a minute
"""

import re
import sys

from lab.figures import Figure, command_parser, record
from lab.fixtures.pytest_runs import run_tests

TEST = "tests/trainer/test_bad_input.py"
OUTCOMES = {"Trained": "trained", "Refused": "refused with reasons", "NoneType": "nothing to learn"}


def main() -> bool:
    command_parser(__doc__).parse_args()
    run = run_tests("-m", "engine", "--hypothesis-profile", "thousand", "--hypothesis-show-statistics", TEST)
    print(run.output)
    passing = re.search(r"(\d+) passing", run.output.split("generate phase")[-1])
    n = int(passing[1]) if passing else 0
    shares = re.findall(r"([\d.]+%), (Trained|Refused|NoneType)", run.output)
    outcomes = ", ".join(f"{share} {OUTCOMES[outcome]}" for share, outcome in shares)
    return record(
        Figure(
            "trainer.5",
            "batches with NaN log-probs, absurd ratios, empty and one-token answers, equal rewards, prompts too long",
            "1,000 batches, policy finite, every refusal with its reason",
            f"{n} hold" if run.ok else "fails",
            "batches",
            run.ok and n >= 1000,
            n,
            f"{outcomes}; all presets without a reference policy, one or two updates, lr 1e-2",
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
