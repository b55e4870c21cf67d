"""Where the programs are that tests run: built on first use, then kept in the cache.

Knows the scripts in `tools/`; what a program is for, and how it is started, its user knows.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__all__ = ["image_archive", "previous_sources", "tool"]

_SCRIPTS = Path(__file__).parents[2] / "tools"


@cache
def tool(name: str, binary: str) -> Path:
    """The path of a binary of one of the tools, such as `tool("kubernetes", "kubectl")`.

    Raises:
        RuntimeError: It could not be built; the message tells why.
    """
    return Path(_printed_by("build.sh", name, binary)) / binary


def image_archive() -> Path:
    """The path of the project's image as a docker-archive, built from the sources as they are now.

    Raises:
        RuntimeError: It could not be built; the message tells why.
    """
    return Path(_printed_by("image.sh"))


@cache
def previous_sources() -> Path:
    """The source tree of the previous release, or of the revision in PREVIOUS.

    Raises:
        RuntimeError: It is not in this checkout's history.
    """
    return Path(_printed_by("previous.sh"))


def _printed_by(script: str, *arguments: str) -> str:
    """Run one of the scripts and return the only line that it prints; its progress goes to our stderr."""
    argv = [str(_SCRIPTS / script), *arguments]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"tools/{script} {' '.join(arguments)} failed; its reason stands above")
    return done.stdout.strip()
