"""A pod whose location is a directory or a bucket of several repositories, and kopia as another client of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.datamover.support.plainkopia import IDENTITY, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube


@dataclass
class LocationBed:
    """The pod, the directory `data` to back up, and the directory `root` in which the location is.

    `storage` returns kopia's arguments for the repository of a namespace.
    """

    pod: MoverPod
    kopia: PlainKopia
    storage: Callable[[str], list[str]]
    data: Path
    root: Path
    connected: str = ""

    @classmethod
    def make(cls, bucket: str, s3: S3Server, kopia: Path, folder: Path) -> Self:
        """Return it with a location in a new bucket of that name; empty: in a directory."""
        pod = MoverPod(FakeKube(), folder)
        root = s3.folder / s3.make_bucket(bucket) / "p" if bucket else folder / "location"
        root.mkdir()
        storage = _bucket(pod, s3, bucket) if bucket else _directory(pod, root)
        data = folder / "data"
        data.mkdir()
        (data / "file").write_bytes(b"12345")
        return cls(pod, PlainKopia(kopia, folder), storage, data, root)

    def add_snapshot(self, namespace: str, path: str, tags: Mapping[str, str]) -> str:
        """Create a snapshot in the repository of a namespace, which is created or connected; return its ID."""
        if namespace != self.connected:
            verb = "connect" if list(self.root.glob(f"kopia/{namespace}/kopia.repository*")) else "create"
            self.kopia.run("repository", verb, *self.storage(namespace), *IDENTITY)
            self.connected = namespace
        flags = [f"--override-source=default@default:{path}", "--pin=velero-pin", "--json"]
        flags += [f"--tags={key}:{value}" for key, value in tags.items()]
        return str(json.loads(self.kopia.run("snapshot", "create", str(self.data), *flags))["id"])


def _directory(pod: MoverPod, root: Path) -> Callable[[str], list[str]]:
    pod.put_location({"fspath": str(root)}, provider="velero.io/fs", bucket="")

    def storage(namespace: str) -> list[str]:
        place = root / "kopia" / namespace
        place.mkdir(parents=True, exist_ok=True)
        return ["filesystem", f"--path={place}"]

    return storage


def _bucket(pod: MoverPod, s3: S3Server, bucket: str) -> Callable[[str], list[str]]:
    storage, credential = {"bucket": bucket, "prefix": "p"}, {"name": "c", "key": "k"}
    pod.put_location({"s3Url": s3.url, "region": "us-east-1"}, objectStorage=storage, credential=credential)
    pod.put_secret("c", "k", s3.credentials_file)
    keys = ("--access-key", s3.access_key, "--secret-access-key", s3.secret_key)
    address = ("--endpoint", s3.url.removeprefix("http://"), "--disable-tls", "--region=us-east-1", *keys)
    return lambda namespace: ["s3", "--bucket", bucket, f"--prefix=p/kopia/{namespace}/", *address]
