"""Flushes of a child that need not flush."""

import errno
import os
from collections.abc import Callable

import pytest

from datamover.runtime import sandbox
from datamover.runtime.confinement import _no_new_privs
from datamover.runtime.sandbox import no_flushes
from tests.support.seccomp import deny

pytestmark = pytest.mark.processes

_FLUSHED = ["EINVAL", "EINVAL"]
"""What the kernel answers: a pipe cannot be flushed."""


def _flush_in_child(prepare: Callable[[], object]) -> list[str]:
    """Flush a pipe by each system call in a child; return the errors, empty where there was none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        prepare()
        for flush in (os.fsync, os.fdatasync):
            error = ""
            try:
                flush(writing)
            except OSError as e:
                error = errno.errorcode[e.errno or 0]
            os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        return answers.read().splitlines()


def _leave_out() -> None:
    for _, call in [_no_new_privs(), *no_flushes()]:
        if call() < 0:
            os._exit(1)


def test_both_system_calls_succeed_without_an_effect() -> None:
    assert _flush_in_child(lambda: None) == _FLUSHED
    assert _flush_in_child(_leave_out) == ["", ""]


def test_a_child_flushes_as_before_where_the_kernel_refuses_the_filter() -> None:
    def refuse() -> None:
        deny((sandbox._ARCHITECTURES[os.uname().machine].seccomp,))()
        _leave_out()

    assert _flush_in_child(refuse) == _FLUSHED


def test_there_is_no_filter_for_an_architecture_with_unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert no_flushes() == []
