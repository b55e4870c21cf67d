"""`python -m tests.cluster ARGUMENT…`: the tests of this tier, in the cluster that it is started in.

Those of the agent run one after another, as they share it; those that have nothing to do with it
run beside them, in a process of their own. The arguments are pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

__all__ = ["main"]

_OF_THE_AGENT = "cluster and not apart"
_APART = "cluster and apart"
_PASSED, _NONE = 0, 5
"""How pytest ends. Source: https://docs.pytest.org/en/stable/reference/exit-codes.html"""


def main(arguments: list[str]) -> int:
    """Run all tests; returns how the first part that did not pass ended, or how pytest ends without any test."""
    with tempfile.TemporaryFile("w+") as said:
        apart = subprocess.Popen(_command(_APART, arguments), stdout=said, stderr=subprocess.STDOUT)
        try:
            of_the_agent = subprocess.run(_command(_OF_THE_AGENT, arguments), check=False).returncode
        finally:
            beside = apart.wait()
        said.seek(0)
        sys.stdout.write(f"\nbeside them: {said.read()}")
    codes = {of_the_agent, beside}
    if codes == {_NONE}:
        return _NONE
    return next(iter(codes - {_PASSED, _NONE}), _PASSED)


def _command(chosen: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments, "-m", chosen]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
