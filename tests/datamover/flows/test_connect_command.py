"""The lines of `nodeagent repo connect-command`, run by a shell with a real kopia and a stand-in for kubectl."""

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from client.repository_view import build_connect_lines
from core.models.base import JsonDict
from core.models.storage import BackupRepository, BackupStorageLocation
from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PlainKopia
from tests.datamover.support.s3server import S3Server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

_BUCKET: Final = "connected"

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
    keys = ("--access-key", s3.access_key, "--secret-access-key", s3.secret_key)
    address = ("--endpoint", s3.url.removeprefix("http://"), "--disable-tls", "--region=us-east-1", *keys)
    storage = ("s3", f"--bucket={_BUCKET}", "--prefix=p/kopia/app/", *address)
    kopia.run("repository", "create", *storage, *IDENTITY)
    (tmp_path / "data").mkdir()
    kopia.run("snapshot", "create", str(tmp_path / "data"))
    done = _run(tmp_path, kopia_program, s3, "\n".join((*_lines(s3), "kopia snapshot list --all --json")))
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


def _run(folder: Path, kopia_program: Path, s3: S3Server, script: str) -> "subprocess.CompletedProcess[str]":
    programs, secrets = folder / "bin", folder / "secrets"
    for directory in (programs, secrets, folder / ".config" / "kopia"):
        directory.mkdir(parents=True)
    (folder / ".config" / "kopia" / "repository.config").write_text("mine")
    (programs / "kubectl").write_text(_KUBECTL)
    (programs / "kubectl").chmod(0o755)
    (programs / "kopia").symlink_to(kopia_program)
    for name, value in (("velero-repo-credentials", PASSWORD), ("keys", s3.credentials_file)):
        (secrets / name).write_bytes(base64.b64encode(value.encode()))
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SECRETS": str(secrets),
    }
    return subprocess.run(["sh", "-euc", script], env=environment, capture_output=True, text=True, check=False)
