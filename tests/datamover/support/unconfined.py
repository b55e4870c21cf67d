"""kopia without confinement: to put a script in its place, and to show what confinement prevents."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_RECORDING = """\
tr '\\0' ' ' </proc/$$/cmdline >>{file}
echo >>{file}
exec PROGRAM "$@"
"""


def leave_unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kopia, or a script that is called so, open any file, as by an ordinary user without Landlock."""

    @contextmanager
    def confine(*_: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr("datamover.kopia.private_run.confine", confine)


def put_program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, name: str = "kopia") -> Path:
    """Let a script of the shell run, unconfined, in the place of a program, which is PROGRAM in it."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    real = shutil.which(name)
    assert real
    program.write_text(f"#!/bin/sh\n{script.replace('PROGRAM', real)}\n")
    program.chmod(0o755)
    leave_unconfined(monkeypatch)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def put_kopia_without_chown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let kopia run without the capability to change owners, as on a file server that takes none."""
    return put_program(folder, 'exec setpriv --bounding-set=-chown PROGRAM "$@"', monkeypatch)


def record_kopia(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let each kopia write its command line, as it is visible on the node, as one line to the returned file."""
    file = folder / "command-lines"
    put_program(folder, _RECORDING.format(file=file), monkeypatch)
    return file
