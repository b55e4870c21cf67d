"""`python -m tests.cluster ARGUMENT…`: the tests of this tier, in the cluster that it is started in.

Most of what they do is to wait, so they run in several processes at the same time, called lanes
(`pytest.mark.lane`): within one they come one after another. What tests of different lanes share is
in `tests.cluster.sharing`. The arguments are pytest's; `--thorough` before them runs what `make test` leaves out.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.testbed.layout import ROOT

LANES = {
    "changing": "changes of the agents' nodes, pods and configuration; the demonstration",
    "waiting": "transfers that are pending, and those of the examples; files and the chart; the image and benchmarks",
    "failing": "transfers that fail, are canceled or deleted; verification and schedules",
    "moving": "transfers that move data",
    "apart": "what has nothing to do with the agents of the cluster",
}
"""Those that run at the same time."""

LAST = "last"
"""The lane that runs when all others have ended."""

FOLDERS = ("cluster", "image", "benchmarks")
"""Where tests of this tier are."""

THOROUGH = "--thorough"

_PASSED, _NONE = 0, 5
"""How pytest ends. Source: https://docs.pytest.org/en/stable/reference/exit-codes.html"""


def main(arguments: list[str]) -> int:
    """Run all tests; returns how a lane that did not pass ended, or how pytest ends without any test."""
    codes = set()
    with ThreadPoolExecutor(max_workers=len(LANES)) as pool:
        running = {pool.submit(_run, lane, arguments): lane for lane in LANES}
        for done in as_completed(running):
            lane, ended = running[done], done.result()
            _report(f"{lane}: {LANES[lane]}\n{ended.stdout}")
            codes.add(ended.returncode)
    last = _run(LAST, arguments)
    _report(f"{LAST}: what all of them asked for\n{last.stdout}")
    codes.add(last.returncode)
    if codes == {_NONE}:
        return _NONE
    return next(iter(codes - {_PASSED, _NONE}), _PASSED)


def _run(lane: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    named = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    modules = [] if named else _modules(lane)
    thorough, given = arguments[:1] == [THOROUGH], arguments[arguments[:1] == [THOROUGH] :]
    # The last one checks the requests of whatever has run.
    which = "" if lane == LAST else f" and {'' if thorough else 'not '}thorough"
    wanted = f"cluster and lane(name='{lane}'){which}"
    argv = [sys.executable, "-m", "pytest", *given, *modules, "-m", wanted]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def _modules(lane: str) -> list[str]:
    """The modules with tests of a lane: to import all of them in each lane takes longer than some of the tests."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py")))
    return [str(path) for path in paths if f'lane(name="{lane}")' in path.read_text(encoding="utf-8")]


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
