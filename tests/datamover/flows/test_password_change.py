"""The password of a repository is changed by the commands that docs/repositories.md has for it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from core.errors import RepositoryError
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube

if TYPE_CHECKING:
    from tests.datamover.support.s3server import S3Server

pytestmark = pytest.mark.processes

_PAGE = Path(__file__).parents[3] / "docs" / "repositories.md"
_BUCKET = "password"
_NEW = "another secret password"


def _commands() -> list[str]:
    """Return the commands of the page that run kopia, in their order."""
    section = _PAGE.read_text().partition("\n## Changing the password\n")[2].partition("\n## ")[0]
    return [line.strip() for line in section.splitlines() if re.match(r" {7}(KOPIA_PASSWORD=\S+ )?kopia ", line)]


@pytest.fixture
async def pod(s3: S3Server, tmp_path: Path) -> MoverPod:
    """A cluster whose repository is in a bucket."""
    s3.make_bucket(_BUCKET)
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_secret("cloud", "key", s3.credentials_file)
    config = {"region": "us-east-1", "s3ForcePathStyle": "true", "s3Url": s3.url}
    pod.put_location(config, bucket=_BUCKET, credential={"name": "cloud", "key": "key"})
    pod.put_repository()
    assert await pod.init() == 0, pod.message
    pod.put_repository(phase="Ready")
    return pod


async def test_after_the_commands_of_the_page_only_the_new_password_opens_the_repository(
    pod: MoverPod, s3: S3Server, tree: Path, tmp_path: Path
) -> None:
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0, pod.message
    snapshot = pod.result["snapshotID"]
    commands = _commands()
    assert len(commands) == 5
    folder = s3.folder / _BUCKET / "kopia" / "app"
    before = (folder / "kopia.repository").read_bytes()
    keys = f"--access-key={s3.access_key} --secret-access-key={s3.secret_key}"
    endpoint = s3.url.removeprefix("http://")
    storage = f"s3 --bucket={_BUCKET} --prefix=kopia/app/ --endpoint={endpoint} --disable-tls {keys}"
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KOPIA_PASSWORD": PASSWORD,
        "KOPIA_NEW_PASSWORD": _NEW,
        "KOPIA_CHECK_FOR_UPDATES": "false",
    }
    for command in commands:
        line = command.replace("STORAGE", storage).replace("NAMESPACE", "app")
        done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, (command, done.stderr.decode())

    pod.put_transfer("DataDownload", snapshotID=snapshot)
    assert await pod.run("data-download", _made(tmp_path / "refused")) == RepositoryError.exit_code
    assert "the repository password does not match" in pod.message
    pod.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, _NEW)
    assert await pod.run("data-download", _made(tmp_path / "target")) == 0, pod.message
    assert describe_tree(tmp_path / "target") == describe_tree(tree)

    assert (tmp_path / "app-kopia.repository").read_bytes() == before
    assert not (tmp_path / "app-kopia.blobcfg").exists()
    (folder / "kopia.repository").write_bytes(before)
    (folder / "kopia.blobcfg").unlink()
    pod.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, PASSWORD)
    assert await pod.run("data-download", _made(tmp_path / "again")) == 0, pod.message


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
