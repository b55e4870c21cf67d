"""An S3 server on loopback: versitygw over a directory, where a bucket is a directory."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.tools import tool
from tests.testbed.pki import KeyPair

__all__ = ["S3Server", "S3ServerError", "free_port", "run_s3_server"]

_START_SECONDS = 15.0
_SHOWN_CHARACTERS = 4000


class S3ServerError(Exception):
    """The server exited too early."""


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

    @property
    def credentials_file(self) -> str:
        """The content of Velero's Secret `cloud-credentials`."""
        return f"[default]\naws_access_key_id = {self.access_key}\naws_secret_access_key = {self.secret_key}\n"


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def run_s3_server(folder: Path, tls: KeyPair | None = None, *, flags: Sequence[str] = ()) -> Iterator[S3Server]:
    """Start the server, and stop it at the end; with `tls` it accepts TLS only.

    Args:
        flags: more of its global flags, such as `--region=eu-west-1`.

    Raises:
        S3ServerError: it exited by itself; the message has its last output.
    """
    address = f"127.0.0.1:{free_port()}"
    server = S3Server(f"{'https' if tls else 'http'}://{address}", folder)
    secured: list[str | Path] = ["--cert", tls.certificate, "--key", tls.key] if tls else []
    keys = {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
    # Not in the directory itself, where it would be a bucket.
    log_file = folder.with_name(f"{folder.name}.log")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [tool("versitygw", "versitygw"), "--port", address, *secured, *flags, "posix", "--nometa", folder],
            env={**os.environ, **keys},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        _wait_for(address, process)
        yield server
    finally:
        ended = process.poll()
        process.terminate()
        process.wait()
    if ended is not None:
        raise S3ServerError(f"the S3 server ended with {ended}: {log_file.read_text()[:_SHOWN_CHARACTERS]}")


def _wait_for(address: str, process: "subprocess.Popen[bytes]") -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)
        else:
            return
