"""A shell for `nodeagent backup` in the scene of backups; it is twelve o'clock."""

from dataclasses import dataclass, field

import pytest

from client import session
from client.cli import collection_commands
from tests.client.support.backup_scene import BackupScene
from tests.client.support.commands import Done, Shell, reach


@dataclass
class BackupShell(Shell):
    """Runs commands against the scene."""

    scene: BackupScene = field(default_factory=BackupScene)

    def run(self, *words: str) -> Done:
        return super().run("backup", *words)


@pytest.fixture
def backup_shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> BackupShell:
    shell = BackupShell(capsys)
    reach(lambda: shell.scene.kube, monkeypatch)
    for module in (collection_commands, session):
        monkeypatch.setattr(module, "SystemClock", lambda: shell.scene.clock)
    return shell
