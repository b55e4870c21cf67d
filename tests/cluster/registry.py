"""An image registry that rejects connections until it is opened.

Serves one image, as containerd exports it: a folder with an index and blobs. Knows no more of the protocol
than a pull needs.
Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md and
https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

import json
import shutil
import socketserver
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.testbed.settings import AGENT_IMAGE

_HOST = "127.0.0.1"
"""A runtime uses plain HTTP for a loopback address: only the first node reaches it."""

_EXPORT = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io", "images", "export")


class Registry(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        """Reserve a port; `folder` has the image."""
        super().__init__((_HOST, 0), _Handler, bind_and_activate=False)
        # A port without a listener rejects connections.
        self.server_bind()
        self.folder = folder
        (self.descriptor,) = json.loads((folder / "index.json").read_text())["manifests"]

    @property
    def image(self) -> str:
        """The name of the image, for pods of the first node."""
        return f"{_HOST}:{self.server_address[1]}/{AGENT_IMAGE}"

    def open(self) -> None:
        self.server_activate()
        threading.Thread(target=self.serve_forever, name="registry", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    """One request: the manifest by tag or digest, or a blob by digest."""

    protocol_version = "HTTP/1.1"
    server: Registry

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _answer(self, *, body: bool) -> None:
        *_, what, reference = self.path.partition("?")[0].split("/")
        descriptor = self.server.descriptor
        digest = reference if ":" in reference else descriptor["digest"]
        blob = self.server.folder / "blobs" / digest.replace(":", "/")
        if what not in {"manifests", "blobs"} or not blob.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", descriptor["mediaType"] if what == "manifests" else "application/octet-stream")
        self.send_header("Docker-Content-Digest", digest)
        self.send_header("Content-Length", str(blob.stat().st_size))
        self.end_headers()
        if body:
            with blob.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)


@contextmanager
def registry() -> Iterator[Registry]:
    """A registry of the project's image, which is closed at first."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        archive = folder / "image.tar"
        subprocess.run([*_EXPORT, str(archive), f"docker.io/library/{AGENT_IMAGE}"], check=True, capture_output=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        with Registry(folder) as server:
            yield server
            server.shutdown()
