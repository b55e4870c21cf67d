"""kopia without confinement: to put a script in its place, and to show what confinement prevents."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def leave_unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kopia, or a script that is called so, open any file, as by an ordinary user without Landlock."""

    @contextmanager
    def confine(*_: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr("datamover.kopia.private_run.confine", confine)
