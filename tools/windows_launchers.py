#!/usr/bin/env python3
"""Writes the programs of the image for Windows that have names of their own: /velero and /velero-restore-helper.

    tools/windows_launchers.py PROJECT OUTPUT

Windows starts no scripts, so each is a launcher of pip's, which starts Python with the archive at its own end. They are
the same on every machine. PROJECT is the directory with the packages.
Source: distlib 0.4, distlib/scripts.py (ScriptMaker._write_script), as in pip.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import Final

import pip

__all__ = ["main"]

_PYTHON: Final = r"C:\Python\python.exe"
"""Where Python's images for Windows have it."""

_LAUNCHER: Final = "_vendor/distlib/t64.exe"
"""For consoles on 64-bit x86."""

_AGENT: Final = "import runpy\nrunpy.run_module('nodeagent', run_name='__main__', alter_sys=True)\n"


def main(arguments: list[str]) -> int:
    """Write the launchers; returns the exit code."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    project, output = map(Path, arguments)
    output.mkdir(parents=True, exist_ok=True)
    helper = (project / "datamover" / "restore_helper.py").read_text(encoding="utf-8")
    _write(output / "velero.exe", "", _AGENT)
    # The options of the image for Linux, less -OO: these modules are not compiled before.
    _write(output / "velero-restore-helper.exe", " -ISu", helper)
    return 0


def _write(path: Path, options: str, script: str) -> None:
    launcher = Path(pip.__file__).parent / _LAUNCHER
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        # Without the time of day, so that the same sources make the same program.
        file.writestr(zipfile.ZipInfo("__main__.py"), script)
    path.write_bytes(launcher.read_bytes() + f"#!{_PYTHON}{options}\r\n".encode() + archive.getvalue())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
