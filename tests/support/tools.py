"""Paths of the programs that tests run: built on first use, then cached.

Uses the scripts in `tools/`.
"""

import subprocess
from functools import cache
from pathlib import Path

_SCRIPTS = Path(__file__).parents[2] / "tools"


@cache
def tool(name: str, binary: str) -> Path:
    """Return the path of a binary of one of the tools, such as `tool("kubernetes", "kubectl")`."""
    arguments = ["cargo.sh", name] if (_SCRIPTS / name / "crate").exists() else ["build.sh", name, binary]
    return Path(_printed_by(*arguments)) / binary


@cache
def azurite_folder() -> Path:
    """Return the directory of Azurite: `node`, and `node_modules` with the emulator."""
    return Path(_printed_by("npm.sh", "azurite"))


def go_command() -> Path:
    """Return the script that runs `go`: the one on the PATH or, where that is missing or too old, the pinned one."""
    return _SCRIPTS / "go.sh"


def image_archive() -> Path:
    """Return the path of the project's image as a docker-archive, built from the current sources."""
    return Path(_printed_by("image.sh"))


@cache
def previous_sources() -> Path:
    """The source tree of the previous release, or of the revision in PREVIOUS."""
    return Path(_printed_by("previous.sh"))


def previous_image() -> Path:
    """Return the path of the previous release's image as a docker-archive, built from its sources."""
    return Path(_printed_by("previous.sh", "--image"))


def _printed_by(script: str, *arguments: str) -> str:
    """Run one of the scripts and return its line of output; its progress is written to stderr."""
    argv = [str(_SCRIPTS / script), *arguments]
    done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"tools/{script} {' '.join(arguments)} failed; its output is above")
    return done.stdout.strip()
