"""The base images of the Dockerfile are pinned by digest, and `tools/digests.py` renews the digests."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.testbed.layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDEX = "application/vnd.oci.image.index.v1+json"
_TOKEN = "made-up-token"
_OLD = f"sha256:{'0' * 64}"

_FILE = """\
# An image of {registry}/library/base:1, which a comment names.
ARG BASE={registry}/library/base:1{digest}
ARG GO={registry}/library/go:2-slim
ARG KOPIA=built
FROM ${{BASE}}
"""


@dataclass
class Registry:
    """A registry on loopback: manifests by repository and tag, each a media type and a body."""

    manifests: dict[str, tuple[str, bytes]]
    address: str = ""
    requires_token: bool = True
    issues_token: bool = True
    header: str = ""
    scopes: list[str] = field(default_factory=list)

    def digest(self, tagged: str) -> str:
        return f"sha256:{hashlib.sha256(self.manifests[tagged][1]).hexdigest()}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        if url.path == "/token":
            self._answer_token(request, parse_qs(url.query))
            return
        if self.requires_token and request.headers["Authorization"] != f"Bearer {_TOKEN}":
            challenge = f'Bearer realm="http://{self.address}/token",service="fake",scope="repository:library:pull"'
            _send(request, 401, b"{}", {"WWW-Authenticate": challenge})
            return
        matched = re.fullmatch(r"/v2/(.+)/manifests/(.+)", url.path)
        tagged = f"{matched[1]}:{matched[2]}" if matched else ""
        kind, body = self.manifests.get(tagged, ("", b""))
        if not kind:
            _send(request, 404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}', {})
        else:
            digest = self.header or self.digest(tagged)
            _send(request, 200, body, {"Content-Type": kind, "Docker-Content-Digest": digest})

    def _answer_token(self, request: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        self.scopes += query["scope"]
        if self.issues_token and query["service"] == ["fake"]:
            _send(request, 200, f'{{"token": "{_TOKEN}"}}'.encode(), {})
        else:
            _send(request, 403, b"{}", {})


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry(
        {
            "library/base:1": (_INDEX, b'{"manifests": ["base"]}'),
            "library/go:2-slim": ("application/vnd.docker.distribution.manifest.list.v2+json", b'{"manifests": []}'),
        }
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def _write(folder: Path, registry: Registry) -> Path:
    file = folder / "Dockerfile"
    file.write_text(_FILE.format(registry=registry.address, digest=f"@{_OLD}"))
    return file


def _renew(file: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    argv = [sys.executable, str(ROOT / "tools" / "digests.py"), str(file)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_all_base_images_are_pinned_by_digest() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    arguments = dict(line[4:].split("=", 1) for line in lines if line.startswith("ARG ") and "=" in line)
    stages = [line.replace("--platform=$BUILDPLATFORM ", "").split() for line in lines if line.startswith("FROM ")]
    names = {words[3] for words in stages if "AS" in words}
    for name in ("BASE", "GO"):
        assert re.fullmatch(r"docker\.io/library/[a-z]+:[a-z0-9.-]+@sha256:[0-9a-f]{64}", arguments[name])
    images = {re.sub(r"\$\{(KOPIA|PACKAGES)\}", lambda used: arguments[used[1]], words[1]) for words in stages}
    assert images - names == {"${BASE}", "${BUILD_BASE}", "${GO}", "scratch"}
    assert arguments["BUILD_BASE"] == "${BASE}"


@pytest.mark.processes
@pytest.mark.parametrize("requires_token", [True, False], ids=["with a token", "without"])
def test_digests_are_those_of_the_registry(tmp_path: Path, registry: Registry, requires_token: bool) -> None:
    registry.requires_token = requires_token
    file = _write(tmp_path, registry)
    before = file.read_text()
    digests = [registry.digest(tagged) for tagged in registry.manifests]
    first, again = _renew(file), _renew(file)
    assert (first.returncode, first.stderr, again.returncode, again.stderr) == (0, "", 0, "")
    expected = before.replace(f"@{_OLD}", f"@{digests[0]}").replace("go:2-slim", f"go:2-slim@{digests[1]}")
    assert file.read_text() == expected
    names = [f"{registry.address}/library/base:1", f"{registry.address}/library/go:2-slim"]
    assert first.stdout.splitlines() == [
        f"{name}: {digest}, was {old}" for name, digest, old in zip(names, digests, (_OLD, "without"), strict=True)
    ]
    pairs = zip(names, digests, strict=True)
    assert again.stdout.splitlines() == [f"{name}: {digest}, unchanged" for name, digest in pairs]
    assert registry.scopes == ["repository:library:pull"] * 4 * requires_token


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manifests": {"library/base:1": (_INDEX, b"{}")}}, "library/go:2-slim: HTTP Error 404: Not Found"),
        ({"issues_token": False}, "library/base:1: HTTP Error 403: Forbidden"),
        ({"header": _OLD}, f"library/base:1: the manifest's digest is not {_OLD}, as the registry claims"),
        (
            {"manifests": {"library/base:1": ("application/vnd.oci.image.manifest.v1+json", b"{}")}},
            "library/base:1: application/vnd.oci.image.manifest.v1+json is the image of one architecture, not an index",
        ),
    ],
    ids=["missing tag", "no token", "wrong digest", "one architecture"],
)
def test_file_stays_as_it_is_if_one_digest_cannot_be_read(
    tmp_path: Path, registry: Registry, change: dict[str, object], message: str
) -> None:
    file = _write(tmp_path, registry)
    before = file.read_text()
    for name, value in change.items():
        setattr(registry, name, value)
    done = _renew(file)
    assert (done.returncode, done.stderr) == (1, f"error: {registry.address}/{message}\n")
    assert file.read_text() == before
