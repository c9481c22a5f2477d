"""Train on a thousand broken batches: does the policy stay finite?

python -m lab.attacks.bad_batches            runs tests/trainer/test_bad_input.py; writes row trainer.5; a minute
python -m lab.attacks.bad_batches --short    a hundred batches; records nothing
"""

import re
import sys

from lab.figures import Figure, command_parser, report
from lab.fixtures.pytest_runs import run_tests

TEST = "tests/trainer/test_bad_input.py"
OUTCOMES = {"Trained": "trained", "Refused": "refused with reasons", "NoneType": "nothing to learn"}


def main() -> bool:
    short = command_parser(__doc__, short="a hundred batches; record nothing").parse_args().short
    profile = [] if short else ["--hypothesis-profile", "thousand"]
    run = run_tests("-m", "engine", *profile, "--hypothesis-show-statistics", TEST)
    print(run.output)
    passing = re.search(r"(\d+) passing", run.output.split("generate phase")[-1])
    n = int(passing[1]) if passing else 0
    shares = re.findall(r"([\d.]+%), (Trained|Refused|NoneType)", run.output)
    outcomes = ", ".join(f"{share} {OUTCOMES[outcome]}" for share, outcome in shares)
    return report(
        short,
        Figure(
            "trainer.5",
            "batches with NaN log-probs, absurd ratios, empty and one-token answers, equal rewards, prompts too long",
            "1,000 batches, policy finite, every refusal with its reason",
            f"{n} hold" if run.ok else "fails",
            "batches",
            run.ok and (short or n >= 1000),
            n,
            f"{outcomes}; all presets without a reference policy, one or two updates, lr 1e-2",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
