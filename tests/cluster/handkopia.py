"""kopia as a person runs it against the test bed's bucket, with the identity that Velero uses."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.bed import Bed
from tests.testbed.processes import BedError

PASSWORD = "static-passw0rd"
"""What all repositories have whose operator set no other."""

_IDENTITY = ("--override-username=default", "--override-hostname=default")


@dataclass(frozen=True)
class HandKopia:
    """kopia on the bucket's prefix of one volume namespace."""

    env: Mapping[str, str]
    storage: tuple[str, ...]

    def run(self, *arguments: str) -> str:
        argv = ["kopia", "--no-auto-maintenance", *arguments]
        done = subprocess.run(argv, env=dict(self.env), capture_output=True, text=True, check=False)
        if done.returncode:
            raise BedError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def create(self) -> None:
        """Create the repository, as Velero would."""
        self.run("repository", "create", *self.storage, *_IDENTITY)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def snapshot_manifests(self) -> list[dict[str, Any]]:
        """The manifests of all snapshots in the repository, complete ones and others."""
        manifests = self.json("manifest", "list")
        return [one for one in manifests if one["labels"].get("type") == "snapshot"]


@contextmanager
def open_kopia(
    bed: Bed, volume_namespace: str, *, prefix: str = "", password: str = PASSWORD, connect: bool = True
) -> Iterator[HandKopia]:
    """A kopia with its settings and its cache in a folder of its own, which is deleted with it.

    It is connected to the repository, unless that has to be created.
    """
    with tempfile.TemporaryDirectory(prefix="handkopia-") as folder:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "KOPIA_CONFIG_PATH": str(Path(folder) / "repository.config"),
            "KOPIA_CHECK_FOR_UPDATES": "false",
            "KOPIA_PASSWORD": password,
            "AWS_ACCESS_KEY_ID": bed.env["BED_S3_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": bed.env["BED_S3_SECRET_KEY"],
        }
        repository = f"{prefix}/kopia/{volume_namespace}/".lstrip("/")
        storage = (
            "s3",
            f"--bucket={bed.env['BED_S3_BUCKET']}",
            f"--endpoint={urlsplit(bed.env['BED_S3_URL']).netloc}",
            "--disable-tls",
            f"--prefix={repository}",
        )
        kopia = HandKopia(env, storage)
        if connect:
            kopia.run("repository", "connect", *storage, *_IDENTITY)
        yield kopia
