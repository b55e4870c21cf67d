"""A shell for `nodeagent backup` in the scene of backups; it is twelve o'clock."""

from dataclasses import dataclass

import pytest

from client.cli import backup_create, collection_commands
from nodeagent.__main__ import main
from nodeagent.runtime import connection
from tests.client.support.backup_scene import BackupScene
from tests.support.fakekube import FakeKube

__all__ = ["BackupShell", "Done", "backup_shell"]


@dataclass(frozen=True)
class Done:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@dataclass
class BackupShell:
    """Runs commands against the scene."""

    scene: BackupScene
    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str) -> Done:
        code = main(["backup", *words])
        captured = self.capsys.readouterr()
        return Done(code, captured.out, captured.err)


@pytest.fixture
def backup_shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> BackupShell:
    shell = BackupShell(BackupScene(), capsys)

    async def load(*_: object) -> tuple[FakeKube, str]:
        return shell.scene.kube, "somewhere"

    monkeypatch.setattr(connection, "load_transport", load)
    for module in (backup_create, collection_commands):
        monkeypatch.setattr(module, "SystemClock", lambda: shell.scene.clock)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
    return shell
