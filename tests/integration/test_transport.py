"""The agent's transport as it is in a pod, against a real API server."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from core.kube.errors import UnauthorizedError
from core.kube.transport import Request
from nodeagent.runtime.transport import load_transport
from tests.datamover.support.mounts import need_root
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
_LIBRARY = "kubernetes_asyncio.config.incluster_config"


@pytest.fixture
def token(apiserver: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process look like a pod; return the file of its token, which is due at once."""
    address = urlsplit(apiserver.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    path = tmp_path / "token"
    monkeypatch.setattr(f"{_LIBRARY}.SERVICE_TOKEN_FILENAME", str(path))
    monkeypatch.setattr(f"{_LIBRARY}.SERVICE_CERT_FILENAME", str(apiserver.ca))
    monkeypatch.setattr(f"{_LIBRARY}.TOKEN_REFRESH_PERIOD", timedelta(0))
    return path


async def test_token_that_is_replaced_counts_from_then_on(apiserver: ApiServer, token: Path) -> None:
    question = Request("GET", "/api/v1/namespaces/default/configmaps")
    token.write_text("expired")
    transport, _ = await load_transport(None)
    before = await transport.request(question)
    token.write_text(apiserver.token + "\n")
    after = await transport.request(question)
    await transport.close()
    assert (before.status, after.status) == (401, 200)


async def test_an_unreadable_token_is_read_again(apiserver: ApiServer, token: Path) -> None:
    token.write_text(apiserver.token)
    transport, _ = await load_transport(None)
    token.unlink()
    with pytest.raises(UnauthorizedError, match="cannot get credentials"):
        await transport.request(Request("GET", "/version"))
    await transport.close()
    assert UnauthorizedError.retry


def test_watches_notice_within_60_seconds_that_every_packet_of_their_connection_is_dropped() -> None:
    """An agent and a mover go on blindly otherwise, while all other requests succeed."""
    need_root("network namespaces")
    argv = ["unshare", "--net", "--kill-child", "--fork"]
    argv += [sys.executable, "-m", "tests.integration.dropped_flow"]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(argv, cwd=_ROOT, env={**os.environ, "PATH": path}, check=True, stdout=subprocess.PIPE)
    measured = json.loads(done.stdout)
    assert measured["keepalive"] == [True, True]
    assert measured["agent"] is not None
    assert measured["mover"] is not None
    assert max(measured["agent"], measured["mover"]) < 60
