"""The mover's own way to the API server, against a real one."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from core.clock import SystemClock
from core.kube.errors import ForbiddenError
from core.kube.transport import MERGE_PATCH, Request
from datamover.pod.api_transport import PodTransport, pod_transport
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.integration


def transport_of(apiserver: ApiServer, token: str, folder: Path) -> PodTransport:
    """Reach the server as from a pod, with the files that the kubelet mounts."""
    shutil.copy(apiserver.ca, folder / "ca.crt")
    (folder / "token").write_text(token)
    address = urlsplit(apiserver.url)
    environment = {"KUBERNETES_SERVICE_HOST": str(address.hostname), "KUBERNETES_SERVICE_PORT": str(address.port)}
    return pod_transport(environment, SystemClock(), folder)


@pytest.fixture
async def transport(apiserver: ApiServer, tmp_path: Path) -> AsyncIterator[PodTransport]:
    transport = transport_of(apiserver, apiserver.token, tmp_path)
    yield transport
    await transport.close()


async def test_objects_are_created_changed_and_read(apiserver: ApiServer, transport: PodTransport) -> None:
    path = f"/api/v1/namespaces/{apiserver.create_namespace()}/configmaps"
    large = "x" * 300_000
    created = await transport.request(Request("POST", path, body=json.dumps({"metadata": {"name": "a"}}).encode()))
    patch = json.dumps({"data": {"key": large}}).encode()
    changed = await transport.request(Request("PATCH", f"{path}/a", body=patch, content_type=MERGE_PATCH))
    read = await transport.request(Request("GET", path, {"fieldSelector": "metadata.name=a"}))
    (found,) = json.loads(read.body)["items"]
    assert (created.status, changed.status, read.status) == (201, 200, 200)
    assert found["data"] == {"key": large}


async def test_a_watch_yields_changes_as_they_happen(apiserver: ApiServer, transport: PodTransport) -> None:
    path = f"/api/v1/namespaces/{apiserver.create_namespace()}/configmaps"
    listed = json.loads((await transport.request(Request("GET", path))).body)
    since = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
    async with asyncio.timeout(300), transport.stream(Request("GET", path, since)) as lines:
        for name in ("a", "b"):
            body = json.dumps({"metadata": {"name": name}}).encode()
            await transport.request(Request("POST", path, body=body))
            change = json.loads(await anext(lines))
            assert (change["type"], change["object"]["metadata"]["name"]) == ("ADDED", name)


async def test_a_forbidden_watch_is_rejected(apiserver: ApiServer, tmp_path: Path) -> None:
    namespace = apiserver.create_namespace()
    transport = transport_of(apiserver, apiserver.account_token(namespace, "default"), tmp_path)
    with pytest.raises(ForbiddenError, match="configmaps"):
        async with transport.stream(Request("GET", f"/api/v1/namespaces/{namespace}/configmaps", {"watch": "true"})):
            pass
    await transport.close()
