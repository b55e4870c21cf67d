"""`python -m tests.fuzz [--examples N] [--seed N]`; the last line is one JSON object."""

import argparse
import json
import logging
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.run import fuzz

_CHUNK = 1000
"""Examples of one run of hypothesis, which remembers all of them."""

_MOST_GROWTH_MIB = 20.0
_PAGE_BYTES = 4096


@dataclass
class Summary:
    """The last line: sizes are those of the process, after the first and after the last chunk."""

    seed: int
    examples: int = 0
    worlds: int = 0
    seconds: float = 0.0
    first_rss_mib: float = 0.0
    last_rss_mib: float = 0.0
    passed: bool = False
    error: str = ""


def _rss_mib() -> float:
    return round(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20, 1)


def _run(summary: Summary, examples: int) -> None:
    chance = random.Random(summary.seed)
    while summary.examples < examples:
        count = fuzz(min(_CHUNK, examples - summary.examples), seeded=chance.getrandbits(32))
        summary.examples += count.examples
        summary.worlds += count.worlds
        summary.last_rss_mib = _rss_mib()
        summary.first_rss_mib = summary.first_rss_mib or summary.last_rss_mib
        print(f"{summary.examples} examples, {summary.last_rss_mib} MiB", file=sys.stderr, flush=True)
    growth = summary.last_rss_mib - summary.first_rss_mib
    assert growth <= _MOST_GROWTH_MIB, f"the process has grown by {growth:.1f} MiB"


def main() -> int:
    """Run the examples and print the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    summary = Summary(options.seed if options.seed is not None else random.SystemRandom().getrandbits(32))
    # Every record is built, as in an agent that logs at debug level, and none is printed.
    logging.basicConfig(level=logging.DEBUG, handlers=[logging.NullHandler()])
    began = time.monotonic()
    try:
        _run(summary, options.examples)
        summary.passed = True
    except Exception as e:  # noqa: BLE001 - it is shown
        # Hypothesis adds the smallest example that fails.
        print("\n".join([repr(e), *getattr(e, "__notes__", [])]), file=sys.stderr)
        summary.error = repr(e)[:500]
    summary.seconds = round(time.monotonic() - began, 1)
    print(json.dumps(asdict(summary)))
    return 0 if summary.passed else 1


if __name__ == "__main__":
    sys.exit(main())
