"""The commands of docs/repositories.md, and of `nodeagent repo connect-command`, run by a shell with a real kopia."""

import base64
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Final

import pytest

from client.repository_view import build_connect_lines
from core.errors import RepositoryError
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET
from core.models.storage import BackupRepository, BackupStorageLocation
from datamover.storage.providers import FileStorage
from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.repositories import opened
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

_PAGE = Path(__file__).parents[3] / "docs" / "repositories.md"
_BUCKET: Final = "documented"


def _commands(indent: int) -> list[str]:
    """Return the commands of the page with that indent that run kopia, in their order."""
    return re.findall(rf"^ {{{indent}}}((?:KOPIA_PASSWORD=\S+ )?kopia .*)$", _PAGE.read_text(), re.MULTILINE)


def _environment(folder: Path, *programs: Path, **more: str) -> dict[str, str]:
    path = ":".join([*map(str, programs), os.environ["PATH"]])
    return {"PATH": path, "HOME": str(folder), "KOPIA_CHECK_FOR_UPDATES": "false"} | more


async def test_these_lines_run_full_maintenance(tmp_path: Path, kopia_program: Path) -> None:
    with opened(FileStorage(tmp_path / "r")) as repository:
        await repository.ensure()
    environment = _environment(tmp_path, kopia_program.parent, KOPIA_PASSWORD=PASSWORD)
    for command in (*_commands(6), "kopia maintenance info --json"):
        words = shlex.split(command.replace("STORAGE", f"filesystem --path={tmp_path / 'r'}"))
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["owner"] == "default@default"
    runs = info["schedule"]["runs"]
    # The task that finds what only deleted snapshots held. Source: kopia 0.23.1, snapshot/snapshotmaintenance.
    assert "snapshot-gc" in runs
    assert all(run["success"] for task in runs.values() for run in task)


_NEW = "another secret password"


@pytest.fixture
async def pod(s3: S3Server, tmp_path: Path) -> MoverPod:
    """A cluster whose repository is in a bucket."""
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, s3.make_bucket(_BUCKET))
    await pod.create_repository()
    return pod


async def test_after_the_commands_of_the_page_only_the_new_password_opens_the_repository(
    pod: MoverPod, s3: S3Server, tree: Path, tmp_path: Path
) -> None:
    snapshot = (await pod.transfer("DataUpload", tree))["snapshotID"]
    commands = _commands(7)
    assert len(commands) == 5
    folder = s3.folder / _BUCKET / "kopia" / "app"
    before = (folder / "kopia.repository").read_bytes()
    storage = " ".join(s3.kopia_flags(_BUCKET))
    environment = _environment(tmp_path, KOPIA_PASSWORD=PASSWORD, KOPIA_NEW_PASSWORD=_NEW)
    for command in commands:
        line = command.replace("STORAGE", storage).replace("NAMESPACE", "app")
        done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == 0, (command, done.stderr.decode())
    pod.put_transfer("DataDownload", snapshotID=snapshot)
    assert await pod.run("data-download", tmp_path / "refused") == RepositoryError.exit_code
    assert "the repository password does not match" in pod.message
    pod.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, _NEW)
    assert await pod.run("data-download", tmp_path / "target") == 0, pod.message
    assert describe_tree(tmp_path / "target") == describe_tree(tree)
    assert (tmp_path / "app-kopia.repository").read_bytes() == before
    assert not (tmp_path / "app-kopia.blobcfg").exists()
    (folder / "kopia.repository").write_bytes(before)
    (folder / "kopia.blobcfg").unlink()
    pod.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, PASSWORD)
    assert await pod.run("data-download", tmp_path / "again") == 0, pod.message


_KUBECTL: Final = """\
#!/bin/sh
test "$1 $2 $4 $5 $6" = "get secret -n velero -o" || exit 9
cat "$SECRETS/$3"
"""
"""Prints the value of the one key that each Secret has, in base64."""


def test_the_lines_connect_read_only_and_leave_no_secret_behind(
    kopia_program: Path, s3: S3Server, tmp_path: Path
) -> None:
    s3.make_bucket(_BUCKET)
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.run("repository", "create", *s3.kopia_flags(_BUCKET, "p/kopia/app/"), *IDENTITY)
    (tmp_path / "data").mkdir()
    kopia.run("snapshot", "create", str(tmp_path / "data"))
    done = _run_lines(tmp_path, kopia_program, s3, "\n".join((*_lines(s3), "kopia snapshot list --all --json")))
    assert done.returncode == 0, done.stderr
    (snapshot,) = json.loads(done.stdout)
    assert snapshot["source"]["path"] == str(tmp_path / "data")
    folder = tmp_path / ".config" / "kopia"
    config = (folder / "nodeagent-velero-default.config").read_text()
    assert s3.secret_key not in config
    assert json.loads(config)["readonly"] is True
    assert not list(folder.glob("*.kopia-password"))
    assert (folder / "repository.config").read_text() == "mine"


def _lines(s3: S3Server) -> list[str]:
    meta = {"namespace": "velero", "uid": "u", "name": "default"}
    typed = {"apiVersion": "velero.io/v1", "metadata": meta}
    spec: JsonDict = {"volumeNamespace": "app", "backupStorageLocation": "default", "maintenanceFrequency": "1h"}
    repository = BackupRepository.parse({**typed, "kind": "BackupRepository", "spec": spec})
    spec = {
        "provider": "aws",
        "config": {"s3Url": s3.url, "region": "us-east-1"},
        "objectStorage": {"bucket": _BUCKET, "prefix": "p"},
        "credential": {"name": "keys", "key": "cloud"},
    }
    location = BackupStorageLocation.parse({**typed, "kind": "BackupStorageLocation", "spec": spec})
    lines = build_connect_lines(repository, location)
    assert not any(secret in "\n".join(lines) for secret in (PASSWORD, s3.secret_key, s3.access_key))
    return lines


def _run_lines(folder: Path, kopia_program: Path, s3: S3Server, script: str) -> "subprocess.CompletedProcess[str]":
    programs, secrets = folder / "bin", folder / "secrets"
    for directory in (programs, secrets, folder / ".config" / "kopia"):
        directory.mkdir(parents=True)
    (folder / ".config" / "kopia" / "repository.config").write_text("mine")
    (programs / "kubectl").write_text(_KUBECTL)
    (programs / "kubectl").chmod(0o755)
    (programs / "kopia").symlink_to(kopia_program)
    for name, value in (("velero-repo-credentials", PASSWORD), ("keys", s3.credentials_file)):
        (secrets / name).write_bytes(base64.b64encode(value.encode()))
    environment = _environment(folder, programs, SECRETS=str(secrets))
    return subprocess.run(["sh", "-euc", script], env=environment, capture_output=True, text=True, check=False)
