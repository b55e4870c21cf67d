"""`python -m tests.retention [--steps N] [--seed N]`; the last line is one JSON object."""

import argparse
import json
import logging
import random
import sys
import time
from dataclasses import asdict, dataclass

from tests.retention.run import STEPS_EACH, run_machine

_MACHINES = 20
"""Of one run of hypothesis."""


@dataclass
class Summary:
    """The last line."""

    seed: int
    steps: int = 0
    seconds: float = 0.0
    passed: bool = False
    error: str = ""


def _run(summary: Summary, steps: int) -> None:
    chance = random.Random(summary.seed)
    while summary.steps < steps:
        machines = min(_MACHINES, -(-(steps - summary.steps) // STEPS_EACH))
        summary.steps += run_machine(machines, seed=chance.getrandbits(32))
        print(f"{summary.steps} steps", file=sys.stderr, flush=True)


def main() -> int:
    """Run the machine and print the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.retention")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    summary = Summary(options.seed if options.seed is not None else random.SystemRandom().getrandbits(32))
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    try:
        _run(summary, options.steps)
        summary.passed = True
    except Exception as e:  # noqa: BLE001 - it is shown
        # Hypothesis adds the smallest sequence that fails.
        print("\n".join([repr(e), *getattr(e, "__notes__", [])]), file=sys.stderr)
        summary.error = repr(e)[:500]
    summary.seconds = round(time.monotonic() - began, 1)
    print(json.dumps(asdict(summary)))
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
