"""`python -m tests.retention [--steps N] [--seed N]`; the last line is one JSON object."""

import argparse
import json
import logging
import random
import sys
import time

from tests.retention.machine import STEPS_EACH, run_machine

_MACHINES = 20
"""Of one run of hypothesis."""


def main() -> int:
    """Run the machine and print the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.retention")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chance, began, steps, error = random.Random(options.seed), time.monotonic(), 0, ""
    try:
        while steps < options.steps:
            machines = min(_MACHINES, -(-(options.steps - steps) // STEPS_EACH))
            steps += run_machine(machines, seed=chance.getrandbits(32))
            print(f"{steps} steps", file=sys.stderr, flush=True)
    except Exception as e:  # noqa: BLE001 - it is shown
        # Hypothesis adds the smallest sequence that fails.
        print("\n".join([repr(e), *getattr(e, "__notes__", [])]), file=sys.stderr)
        error = repr(e)[:500]
    seconds = round(time.monotonic() - began, 1)
    summary = {"seed": options.seed, "steps": steps, "seconds": seconds, "passed": not error, "error": error}
    print(json.dumps(summary))
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
