"""The transport to the API server: configuration, credentials, requests and streams."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web

from core.clock import SystemClock
from core.errors import ConfigError
from core.kube.errors import ForbiddenError, GoneError, UnreachableError
from core.kube.transport import KEEPALIVE_OPTIONS, MERGE_PATCH, Request
from core.models.base import JsonDict
from nodeagent.runtime.http import HttpTransport
from nodeagent.runtime.transport import load_transport
from tests.support.sockets import connections_to
from tests.support.tasks import interrupt, until

_LINE = b"x" * 3_000_000


class Server:
    """Responds over plain HTTP and records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, str]] = []
        self.impersonated: list[tuple[str, str]] = []
        self.url = ""
        self.released = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        body = (await request.read()).decode()
        seen = (request.method, request.path_qs, headers.get("Authorization", ""), headers.get("Content-Type", ""))
        self.requests.append(seen)
        self.impersonated += [(key, value) for key, value in headers.items() if key.startswith("Impersonate-")]
        match request.path:
            case "/forbidden":
                return web.json_response({"message": "no", "reason": "Forbidden"}, status=403)
            case "/busy":
                return web.Response(status=429, headers={"Retry-After": "7"})
            case "/silent":
                await self.released.wait()
            case "/cut":
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b"one\ntw")
                assert request.transport is not None
                request.transport.abort()
                return response
            case "/large":
                return web.Response(body=_LINE * 6)
            case "/lines":
                return web.Response(body=b"one\n" + _LINE + b"\ntwo")
        return web.json_response({"body": body})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    serving = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serving.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    serving.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield serving
    serving.released.set()
    await runner.cleanup()


@pytest.fixture(autouse=True)
def _outside_of_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)


def write_kubeconfig(folder: Path, url: str, user: object, **context: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", **context}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
async def transport(server: Server, tmp_path: Path) -> AsyncIterator[HttpTransport]:
    """A transport to the server, with the token t."""
    transport, _ = await load_transport(write_kubeconfig(tmp_path, server.url, {"token": "t"}))
    yield transport
    await transport.close()


async def test_requests_carry_token_query_body_and_type(server: Server, tmp_path: Path) -> None:
    transport, namespace = await load_transport(write_kubeconfig(tmp_path, server.url, {"token": "t1"}, namespace="ns"))
    patch = Request("PATCH", "/api/v1/pods", {"labelSelector": "a in (b,c)"}, b'{"x":"\xc3\xbc"}', MERGE_PATCH)
    response = await transport.request(patch)
    await transport.close()
    assert namespace == "ns"
    assert json.loads(response.body) == {"body": '{"x":"ü"}'}
    method, path, token, content_type = server.requests[0]
    assert (method, token, content_type) == ("PATCH", "Bearer t1", MERGE_PATCH)
    assert path.startswith("/api/v1/pods?labelSelector=")


async def test_nothing_is_sent_after_the_end(server: Server, transport: HttpTransport) -> None:
    """A session that is opened then would never be closed."""
    await transport.close()
    with pytest.raises(UnreachableError, match="GET /version: this client is closed"):
        await transport.request(Request("GET", "/version"))
    assert server.requests == []


async def test_a_user_acts_as_another_one_as_with_kubectl(server: Server, tmp_path: Path) -> None:
    other: JsonDict = {"as": "jo", "as-groups": ["g1", "g2"], "as-uid": "7", "as-user-extra": {"a.io/scope": ["s"]}}
    transport, _ = await load_transport(write_kubeconfig(tmp_path, server.url, {"token": "t"} | other))
    await transport.request(Request("GET", "/version"))
    await transport.close()
    groups = [("Impersonate-Group", "g1"), ("Impersonate-Group", "g2")]
    extra = ("Impersonate-Extra-a.io%2Fscope", "s")
    assert server.impersonated == [("Impersonate-User", "jo"), *groups, ("Impersonate-Uid", "7"), extra]
    assert [token for _, _, token, _ in server.requests] == ["Bearer t"]


@pytest.mark.parametrize("in_pod", [False, True])
@pytest.mark.parametrize("at_home", [False, True])
async def test_the_environments_kubeconfig(
    in_pod: bool, at_home: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with kubectl: a job of a CI system runs in a pod of another cluster than it is about."""
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    written = Path(write_kubeconfig(tmp_path, server.url, {"token": "t2"}))
    if at_home:
        (tmp_path / "home" / ".kube").mkdir(parents=True)
        written.rename(tmp_path / "home" / ".kube" / "config")
    else:
        monkeypatch.setenv("KUBECONFIG", str(written))
    transport, namespace = await load_transport(None)
    await transport.request(Request("GET", "/version"))
    await transport.close()
    assert namespace is None
    assert server.requests[0][2] == "Bearer t2"


async def test_the_named_context_is_used(server: Server, tmp_path: Path) -> None:
    path = Path(write_kubeconfig(tmp_path, "http://127.0.0.1:1", {"token": "current"}, namespace="ns"))
    config = json.loads(path.read_text())
    config["clusters"].append({"name": "k2", "cluster": {"server": server.url}})
    config["users"].append({"name": "u2", "user": {"token": "named"}})
    config["contexts"].append({"name": "c2", "context": {"cluster": "k2", "user": "u2", "namespace": "ns2"}})
    path.write_text(json.dumps(config))
    transport, namespace = await load_transport(str(path), "c2")
    await transport.request(Request("GET", "/version"))
    await transport.close()
    assert namespace == "ns2"
    assert server.requests[0][2] == "Bearer named"


@pytest.mark.parametrize(
    ("in_pod", "has_file", "context", "error"),
    [
        (False, True, "c9", r"cannot use kubeconfig .* c9 "),
        (True, False, "c", "--kubecontext c needs --kubeconfig PATH"),
        (True, False, None, "cannot use the pod's ServiceAccount"),
        (False, False, None, r"~/\.kube/config does not exist: set --kubeconfig PATH"),
    ],
    ids=["unknown context", "context without a kubeconfig", "pod without an account", "neither"],
)
async def test_what_leads_to_no_api_server_is_a_one_line_error(
    *, in_pod: bool, has_file: bool, context: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    path = write_kubeconfig(tmp_path, "http://127.0.0.1:1", {"token": "t"}) if has_file else None
    with pytest.raises(ConfigError, match=error) as caught:
        await load_transport(path, context)
    assert "\n" not in str(caught.value)


async def test_the_current_context_of_the_first_file_counts(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with kubectl: otherwise a command acts on another cluster than the person sees."""
    paths = []
    for name, current in (("none", ""), ("first", "first"), ("second", "second")):
        (tmp_path / name).mkdir()
        path = Path(write_kubeconfig(tmp_path / name, server.url, {"token": name}))
        text = path.read_text().replace('"u"', f'"{name}"').replace('"c"', f'"{name}"')
        paths.append(path)
        path.write_text(text.replace(f'"current-context": "{name}"', f'"current-context": "{current}"'))
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, [tmp_path / "absent", *paths, ""])))
    transport, _ = await load_transport(None)
    await transport.request(Request("GET", "/version"))
    await transport.close()
    assert server.requests[0][2] == "Bearer first"


@pytest.mark.processes
@pytest.mark.parametrize(("seconds", "tokens"), [(None, ["t1", "t1"]), (240, ["t1", "t1"]), (5, ["t11", "t111"])])
async def test_exec_plugin_is_asked_for_a_token_and_again_once_it_expires(
    seconds: float | None, tokens: list[str], server: Server, tmp_path: Path
) -> None:
    plugin, asked = tmp_path / "plugin", tmp_path / "asked"
    status = {"token": "t$n"}
    if seconds is not None:
        status["expirationTimestamp"] = (SystemClock().now() + timedelta(seconds=seconds)).isoformat()
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    text = json.dumps(credential).replace('"', '\\"')
    plugin.write_text(f'#!/bin/sh\nprintf 1 >> {asked}\nn=$(cat {asked})\necho "{text}"\n')
    plugin.chmod(stat.S_IRWXU)
    run: JsonDict = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "args": [], "env": None}
    transport, _ = await load_transport(write_kubeconfig(tmp_path, server.url, {"exec": run}))
    for _ in range(2):
        await transport.request(Request("GET", "/version"))
    await transport.close()
    assert [token for _, _, token, _ in server.requests] == [f"Bearer {token}" for token in tokens]


async def test_a_token_in_a_file_may_be_replaced(server: Server, tmp_path: Path) -> None:
    """By the kubelet: a token of a ServiceAccount is valid for an hour."""
    token = tmp_path / "token"
    token.write_text("t1\n")
    transport, _ = await load_transport(write_kubeconfig(tmp_path, server.url, {"tokenFile": "token"}))
    await transport.request(Request("GET", "/version"))
    token.write_text("t2\n")
    await transport.request(Request("GET", "/version"))
    await transport.close()
    assert [token for _, _, token, _ in server.requests] == ["Bearer t1", "Bearer t2"]


async def test_responses_of_any_status_are_returned(transport: HttpTransport) -> None:
    forbidden = await transport.request(Request("GET", "/forbidden"))
    busy = await transport.request(Request("GET", "/busy"))
    assert forbidden.status == 403
    assert (busy.status, busy.retry_after) == (429, "7")
    assert forbidden.date is not None
    assert forbidden.date.endswith(" GMT")


async def test_stream_yields_lines_of_any_length(transport: HttpTransport) -> None:
    async with transport.stream(Request("GET", "/lines")) as lines:
        found = [line async for line in lines]
    assert found == [b"one", _LINE, b"two"]


async def test_a_response_that_is_larger_than_any_object_is_not_read_to_its_end(transport: HttpTransport) -> None:
    with pytest.raises(UnreachableError, match="GET /large: the response exceeds 16 MiB"):
        await transport.request(Request("GET", "/large"))
    with pytest.raises(GoneError, match="GET /large: a line exceeds 16 MiB"):
        async with transport.stream(Request("GET", "/large")) as lines:
            await anext(lines)
    assert len((await transport.request(Request("GET", "/large", many=True))).body) == 6 * len(_LINE)


async def test_broken_stream_is_unreachable_after_its_whole_lines(transport: HttpTransport) -> None:
    async with transport.stream(Request("GET", "/cut")) as lines:
        assert await anext(lines) == b"one"
        with pytest.raises(UnreachableError, match="GET /cut"):
            await anext(lines)


async def test_rejected_stream_raises_on_entering(transport: HttpTransport) -> None:
    with pytest.raises(ForbiddenError):
        async with transport.stream(Request("GET", "/forbidden")):
            pass


async def test_a_timeout_is_unreachable(transport: HttpTransport) -> None:
    with pytest.raises(UnreachableError, match="timed out"):
        await transport.request(Request("GET", "/silent", timeout_seconds=0.2))


async def test_canceled_stream_is_closed(server: Server, transport: HttpTransport) -> None:
    async def read() -> None:
        async with transport.stream(Request("GET", "/silent")) as lines:
            await anext(lines)

    await interrupt(read(), until(lambda: bool(server.requests), seconds=60, every=0.01))
    await transport.close()


async def test_a_closed_port_is_unreachable(tmp_path: Path) -> None:
    transport, _ = await load_transport(write_kubeconfig(tmp_path, "http://127.0.0.1:1", {"token": "t"}))
    with pytest.raises(UnreachableError):
        await transport.request(Request("GET", "/version"))
    with pytest.raises(UnreachableError):
        async with transport.stream(Request("GET", "/version")):
            pass
    await transport.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "cannot use"),
        ("a: [b", "cannot use"),
        ("just text", "cannot use"),
        ("user: {token: its-secret: x}", "cannot use"),
        ("apiVersion: v1\nkind: Config\n", "current-context"),
    ],
    ids=["absent", "empty", "no-yaml", "text", "token", "no-context"],
)
async def test_an_unusable_kubeconfig_is_a_one_line_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        await load_transport(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("environment", "host", "proxy"),
    [
        ({}, "cluster.test", None),
        ({"https_proxy": "http://proxy:3128"}, "cluster.test", "http://proxy:3128"),
        ({"https_proxy": "proxy:3128"}, "cluster.test", "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "cluster.test"}, "cluster.test", None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": ".svc,a/b, 10.96.0.0/12"}, "10.96.0.1", None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "10.0.0.0/16,fd00::/8"}, "10.96.0.1", "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "fd00::/8"}, "[fd00::1]", None),
        ({"https_proxy": "http://proxy:3128"}, "127.0.0.1", None),
        ({"https_proxy": "http://proxy:3128"}, "localhost", None),
        ({"http_proxy": "http://proxy:3128"}, "cluster.test", None),
    ],
)
async def test_the_proxy_of_the_environment_is_used_as_by_other_clients(
    environment: dict[str, str], host: str, proxy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    transport, _ = await load_transport(write_kubeconfig(tmp_path, f"https://{host}:6443", {"token": "t"}))
    assert transport._endpoint.options.get("proxy") == proxy
    await transport.close()


async def test_a_connection_has_keepalive(server: Server, transport: HttpTransport) -> None:
    await transport.request(Request("GET", "/version"))
    (connection,) = connections_to(int(server.url.rpartition(":")[2]))
    with connection:
        assert {option: connection.getsockopt(*option) for option in KEEPALIVE_OPTIONS} == KEEPALIVE_OPTIONS
