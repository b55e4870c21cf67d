"""What holds for every test here: the product asks the API server only for what its permissions allow."""

import pytest

from tests.client.support.commands import Shell, open_shell
from tests.client.support.status_scene import StatusScene
from tests.support.granted import only_granted_requests

__all__ = ["only_granted_requests"]


@pytest.fixture
def scene() -> StatusScene:
    """A cluster with transfers; many modules have another scene."""
    scene = StatusScene()
    scene.put_transfers()
    return scene


@pytest.fixture
def shell(scene: StatusScene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Commands that reach the scene of the module."""
    return open_shell(scene.kube, capsys, monkeypatch)
