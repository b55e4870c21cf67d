"""The released kopia: Velero opens what it writes, and the other way round."""

from pathlib import Path

import pytest

from tests.support.tools import tool


@pytest.fixture(scope="session")
def kopia_program() -> Path:
    return tool("kopia", "kopia")
