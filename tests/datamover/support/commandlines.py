"""The command lines of kopia, as visible in the node's processes."""

import os
import shutil
from pathlib import Path

import pytest

from tests.datamover.support.unconfined import leave_unconfined

_RECORDING = """#!/bin/sh
tr '\\0' ' ' </proc/$$/cmdline >>{record}
echo >>{record}
exec {kopia} "$@"
"""


def record_kopia(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let each kopia write its command line as one line to the returned file."""
    file, kopia = folder / "command-lines", folder / "bin" / "kopia"
    kopia.parent.mkdir()
    kopia.write_text(_RECORDING.format(record=file, kopia=shutil.which("kopia")))
    kopia.chmod(0o755)
    leave_unconfined(monkeypatch)
    monkeypatch.setenv("PATH", f"{kopia.parent}:{os.environ['PATH']}")
    return file
