"""An S3 server on loopback: versitygw over a directory, where a bucket is a directory."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from tests.datamover.support.servers import run_server
from tests.support.sockets import free_port
from tests.support.tools import tool
from tests.testbed.pki import KeyPair


@dataclass(frozen=True)
class S3Server:
    url: str
    folder: Path
    access_key: str = "test-access-key"
    secret_key: str = "test-secret-key-of-s3"

    def make_bucket(self, name: str) -> str:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        return name

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket at once: files that the server adds meanwhile go with it, where rmtree fails."""
        with suppress(FileNotFoundError):
            (self.folder / name).rename(mkdtemp(dir=self.folder.parent))

    def put(self, bucket: str, name: str, content: bytes) -> None:
        path = self.folder / bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def kopia_flags(self, bucket: str, prefix: str = "kopia/app/") -> list[str]:
        """Return the arguments by which kopia itself creates a repository in a bucket, or connects to it."""
        address = (f"--endpoint={self.url.removeprefix('http://')}", "--disable-tls", "--region=us-east-1")
        keys = (f"--access-key={self.access_key}", f"--secret-access-key={self.secret_key}")
        return ["s3", f"--bucket={bucket}", f"--prefix={prefix}", *address, *keys]

    @property
    def credentials_file(self) -> str:
        """The content of Velero's Secret `cloud-credentials`."""
        return f"[default]\naws_access_key_id = {self.access_key}\naws_secret_access_key = {self.secret_key}\n"


@contextmanager
def run_s3_server(folder: Path, tls: KeyPair | None = None, *, flags: Sequence[str] = ()) -> Iterator[S3Server]:
    """Start the server, and stop it at the end; with `tls` it accepts TLS only.

    Args:
        flags: more of its global flags, such as `--region=eu-west-1`.

    Raises:
        ServerError: it exited by itself.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    server = S3Server(f"{'https' if tls else 'http'}://{address}", folder)
    secured: list[str | Path] = ["--cert", tls.certificate, "--key", tls.key] if tls else []
    argv = [tool("versitygw", "versitygw"), "--port", address, *secured, *flags, "posix", "--nometa", folder]
    with run_server(argv, {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}, folder, port):
        yield server
