"""A pod whose location is a directory or a bucket of several repositories, and kopia as another client of it."""

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
        if bucket:
            root = s3.folder / s3.make_bucket(bucket) / "p"
            pod.put_bucket(s3, bucket, objectStorage={"bucket": bucket, "prefix": "p"})
        else:
            root = folder / "location"
            pod.put_location({"fspath": str(root)}, provider="velero.io/fs", bucket="")
        root.mkdir()

        def storage(namespace: str) -> list[str]:
            if bucket:
                return s3.kopia_flags(bucket, f"p/kopia/{namespace}/")
            (place := root / "kopia" / namespace).mkdir(parents=True, exist_ok=True)
            return ["filesystem", f"--path={place}"]

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
        tagged = (f"--tags={key}:{value}" for key, value in tags.items())
        return self.kopia.snapshot(self.data, "--pin=velero-pin", *tagged, source=path)
