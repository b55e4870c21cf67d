"""What replaces a token file for each storage, what needs no replacement, and the service on loopback."""

import asyncio
import json
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from core.clock import SystemClock
from core.errors import RepositoryError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.storage.token_files import (
    Loopback,
    LoopbackAnswer,
    azure_token_file,
    replace_token_files,
    serve_on_loopback,
)
from datamover.storage.token_requests import _encode_grant
from tests.datamover.support.identities import RoleOfPod
from tests.datamover.support.internet import Answer, serve_plain
from tests.datamover.support.locations import QuickClock

_S3: JsonDict = {"type": "s3", "config": {"bucket": "b", "accessKeyID": "", "secretAccessKey": "", "sessionToken": ""}}
_TOKEN = "token-of-the-service-account"
_replace = partial(replace_token_files, redactor=Redactor(), clock=SystemClock())


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{_TOKEN}\n")
    return file


def _ask(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as e:
        with e:
            return e.code, e.read().decode()


async def _ask_for_keys(config: JsonDict) -> tuple[int, str]:
    """Ask as kopia does that assumes the role of its configuration."""
    return await asyncio.to_thread(_ask, config["roleEndpoint"], {"X-Amz-Security-Token": config["sessionToken"]})


def _of_agent(url: str, token_file: Path) -> dict[str, str]:
    """The environment of a pod with an identity of EKS."""
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token_file),
    }


async def test_kopia_assumes_a_role_of_the_mover_in_the_place_of_an_agents_token(token_file: Path) -> None:
    role = RoleOfPod(_TOKEN, access_key="key", secret_key="secret-of-the-role")
    redactor = Redactor()
    async with serve_plain(role.agent) as url, _replace(_S3, _of_agent(url, token_file), redactor=redactor) as replaced:
        config = replaced.config
        assert config["bucket"] == "b"
        status, granted = await _ask_for_keys(config)
        token_file.write_text("another token")
        refused = await _ask_for_keys(config)
    assert (status, "<SecretAccessKey>secret-of-the-role</SecretAccessKey>" in granted) == (200, True)
    assert refused[0] == 403
    assert f"cannot get keys of this pod&#x27;s role with the token in {token_file}: 127.0.0.1" in refused[1]
    secrets = (_TOKEN, "secret-of-the-role", "session-0", config["sessionToken"])
    assert not any(secret in redactor.redact(" ".join(secrets)) for secret in secrets)


@pytest.mark.parametrize(
    ("url", "token"),
    [("node-agent", _TOKEN), ("file:///etc", _TOKEN), ("http://127.0.0.1:9", f"{_TOKEN}\n{_TOKEN}")],
    ids=["no URL", "another scheme", "two tokens"],
)
async def test_a_url_or_token_that_is_invalid_is_refused_at_once(token_file: Path, url: str, token: str) -> None:
    token_file.write_text(token)
    async with _replace(_S3, _of_agent(url, token_file)) as replacement:
        status, text = await _ask_for_keys(replacement.config)
    assert (status, _TOKEN in text) == (403, False)
    assert f"with the token in {token_file}: the token or AWS_CONTAINER_CREDENTIALS_FULL_URI is invalid" in text


@pytest.mark.parametrize(
    ("failures", "failure"),
    [
        (1, Answer("", 503)),
        (100, Answer("", 503)),
        (1, Answer("{}", 200, {"Content-Length": "99"})),
        (1, Answer("no chunk", 200, {"Transfer-Encoding": "chunked"})),
        (1, Answer("no chunk", 503, {"Transfer-Encoding": "chunked"})),
        (1, Answer("", 200, dict.fromkeys(map(str, range(100)), "too many"))),
    ],
    ids=["once", "always", "truncated", "invalid body", "invalid reason", "invalid head"],
)
async def test_a_busy_agent_is_asked_for_half_a_minute(token_file: Path, failures: int, failure: Answer) -> None:
    role, clock = RoleOfPod(_TOKEN, failures=failures, failure=failure), QuickClock()
    async with serve_plain(role.agent) as url, _replace(_S3, _of_agent(url, token_file), clock=clock) as replacement:
        status, text = await _ask_for_keys(replacement.config)
    # kopia's errors name the outage.
    assert (status, "503 " in text) == ((200, False) if failures == 1 else (503, True))
    assert sum(clock.slept) < 60


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "{token}"}, {"accessKeyID": "k"}),
        ({"AWS_ROLE_ARN": "arn", "AWS_WEB_IDENTITY_TOKEN_FILE": "{token}-missing"}, {}),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9"}, {}),
        ({"GOOGLE_APPLICATION_CREDENTIALS": "{token}"}, {}),
    ],
    ids=["keys", "no such file", "no token", "file of another provider"],
)
async def test_a_value_of_no_file_stays(token_file: Path, environment: dict[str, str], keys: dict[str, str]) -> None:
    """The DaemonSet sets a variable for each provider, whether there is a Secret or not."""
    given = {name: value.format(token=token_file) for name, value in environment.items()}
    config = {**_S3["config"], **keys}
    async with _replace({"type": "s3", "config": config}, given) as replacement:
        assert (replacement.config, replacement.files) == (config, {})


_ORIGIN: JsonDict = {"file": "{token}", "format": {"type": "text"}}
_ACCOUNT: JsonDict = {"type": "external_account", "audience": "a", "credential_source": _ORIGIN}


@pytest.mark.parametrize(
    "document",
    [_ACCOUNT, {"source_credentials": _ACCOUNT}, {"type": "authorized_user", "refresh_token": "r"}],
    ids=["external account", "impersonated by one", "no token file"],
)
async def test_googles_library_gets_a_url_for_a_file(tmp_path: Path, token_file: Path, document: JsonDict) -> None:
    (file := tmp_path / "google.json").write_text(json.dumps(document).replace("{token}", str(token_file)))
    async with _replace({"type": "gcs", "config": {}}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}) as replacement:
        passed = json.loads(replacement.files["GOOGLE_APPLICATION_CREDENTIALS"])
        found = passed.get("source_credentials", passed)
        if "audience" not in found:
            assert passed == document
            return
        source = found["credential_source"]
        answer = await asyncio.to_thread(_ask, source["url"], source["headers"])
        token_file.unlink()
        missing = await asyncio.to_thread(_ask, source["url"], source["headers"])
    assert answer == (200, _TOKEN)
    assert missing == (500, f"credential_source.file: cannot read {token_file}: No such file or directory")
    assert (found["audience"], source["format"]) == ("a", {"type": "text"})


def test_a_federated_token_file_of_azure_is_used_unless_there_is_a_secret(token_file: Path) -> None:
    config = {"azureFederatedTokenFile": str(token_file)}
    assert azure_token_file(config) == str(token_file)
    for other in ({"sasToken": "s"}, {"azureFederatedTokenFile": f"{token_file}-missing"}):
        assert azure_token_file(config | other) is None


def test_an_answer_without_keys_is_refused() -> None:
    with pytest.raises(RepositoryError, match="cannot get keys: the answer has no keys"):
        _encode_grant({"AccessKeyId": "a", "Expiration": "tomorrow"}, "cannot get keys", Redactor())


async def _answer() -> LoopbackAnswer:
    return HTTPStatus.OK, b"credentials"


async def _send(loopback: Loopback, head: bytes) -> bytes:
    port = urlsplit(loopback.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST / HTTP/1.1\r\nX-Secret: {secret}\r\nContent-Length: 4\r\n\r\nbody", b"HTTP/1.1 200 OK"),
        ("GET / HTTP/1.1\r\nX-Secret: {secret}x\r\n\r\n", b"HTTP/1.1 403 Forbidden"),
        ("GET / HTTP/1.1\r\nAuthorization: {secret}\r\n\r\n", b"HTTP/1.1 403 Forbidden"),
        ("hello\r\n\r\n", b""),
    ],
    ids=["secret", "another secret", "another header", "no request"],
)
async def test_only_who_knows_the_secret_is_served(head: str, status: bytes) -> None:
    async with serve_on_loopback("x-secret", _answer) as loopback:
        received = await _send(loopback, head.format(secret=loopback.secret).encode())
    assert received.split(b"\r\n")[0] == status
    assert received.endswith(b"\r\n\r\ncredentials") == (b"200" in status)


async def test_an_answer_that_is_still_awaited_ends_with_the_service() -> None:
    asked = asyncio.Event()

    async def never() -> LoopbackAnswer:
        asked.set()
        await asyncio.Event().wait()
        return HTTPStatus.OK, b""

    async with serve_on_loopback("x-secret", never) as loopback:
        head = f"GET / HTTP/1.1\r\nX-Secret: {loopback.secret}\r\n\r\n"
        sending = asyncio.get_running_loop().create_task(_send(loopback, head.encode()))
        await asked.wait()
    assert await sending == b""
