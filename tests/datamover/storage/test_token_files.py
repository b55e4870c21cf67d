"""What replaces a token file for each storage, what needs no replacement, and the service on loopback."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    async with (
        serve_plain(role.agent) as url,
        _replace(_S3, _of_agent(url, token_file), redactor=redactor) as replacement,
    ):
        config = replacement.config
        assert config["bucket"] == "b"
        status, granted = await _ask_for_keys(config)
        token_file.write_text("another token")
        refused = await _ask_for_keys(config)
    assert (status, "<SecretAccessKey>secret-of-the-role</SecretAccessKey>" in granted) == (200, True)
    assert refused[0] == 403
    assert f"cannot get keys of this pod&#x27;s role with the token in {token_file}: 127.0.0.1" in refused[1]
    secrets = (_TOKEN, "secret-of-the-role", "session-0", config["sessionToken"])
    assert not any(secret in redactor.redact(" ".join(secrets)) for secret in secrets)


_BUSY = Answer("", 503)


@pytest.mark.parametrize(
    ("failures", "failure"),
    [
        (1, _BUSY),
        (100, _BUSY),
        (1, Answer("{}", 200, {"Content-Length": "99"})),
        (1, Answer("no chunk", 200, {"Transfer-Encoding": "chunked"})),
        (1, Answer("no chunk", 503, {"Transfer-Encoding": "chunked"})),
        (1, Answer("", 200, dict.fromkeys(map(str, range(100)), "too many"))),
    ],
    ids=["once", "always", "truncated", "invalid body", "invalid reason", "invalid head"],
)
async def test_an_agent_that_is_busy_is_asked_again_for_half_a_minute(
    token_file: Path, failures: int, failure: Answer
) -> None:
    role = RoleOfPod(_TOKEN, failures=failures, failure=failure)
    clock = QuickClock()
    async with (
        serve_plain(role.agent) as url,
        _replace(_S3, _of_agent(url, token_file), clock=clock) as replacement,
    ):
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
async def test_what_needs_no_replacement_is_left_as_it_is(
    token_file: Path, environment: dict[str, str], keys: dict[str, str]
) -> None:
    """The DaemonSet sets a variable for each provider, whether there is a Secret or not."""
    given = {name: value.format(token=token_file) for name, value in environment.items()}
    config = {**_S3["config"], **keys}
    async with _replace({"type": "s3", "config": config}, given) as replacement:
        assert (replacement.config, replacement.files) == (config, {})


@asynccontextmanager
async def _replaced_for_google(tmp_path: Path, document: JsonDict) -> AsyncIterator[bytes]:
    """Yield what kopia gets in the place of a credentials file."""
    file = tmp_path / "google.json"
    file.write_text(json.dumps(document))
    async with _replace({"type": "gcs", "config": {}}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}) as replacement:
        yield replacement.files["GOOGLE_APPLICATION_CREDENTIALS"]


@pytest.mark.parametrize("nested", [False, True], ids=["external account", "impersonated by one"])
async def test_googles_library_gets_a_url_in_the_place_of_a_file(
    tmp_path: Path, token_file: Path, nested: bool
) -> None:
    origin = {"file": str(token_file), "format": {"type": "text"}}
    account: JsonDict = {"type": "external_account", "audience": "a", "credential_source": origin}
    async with _replaced_for_google(tmp_path, {"source_credentials": account} if nested else account) as content:
        document = json.loads(content)
        found = document["source_credentials"] if nested else document
        source = found["credential_source"]
        answer = await asyncio.to_thread(_ask, source["url"], source["headers"])
        token_file.unlink()
        missing = await asyncio.to_thread(_ask, source["url"], source["headers"])
    assert answer == (200, _TOKEN)
    assert missing == (500, f"credential_source.file: cannot read {token_file}: No such file or directory")
    assert (found["audience"], source["format"]) == ("a", {"type": "text"})


async def test_a_google_file_without_a_token_file_is_passed_as_it_is(tmp_path: Path) -> None:
    document = {"type": "authorized_user", "refresh_token": "r"}
    async with _replaced_for_google(tmp_path, document) as content:
        assert content == json.dumps(document).encode()


def test_a_federated_token_file_of_azure_is_used_unless_there_is_a_secret(token_file: Path) -> None:
    config = {"azureFederatedTokenFile": str(token_file)}
    assert azure_token_file(config) == str(token_file)
    for other in ({"sasToken": "s"}, {"azureFederatedTokenFile": f"{token_file}-missing"}):
        assert azure_token_file(config | other) is None


def test_an_answer_without_keys_is_refused() -> None:
    with pytest.raises(RepositoryError, match="cannot get keys: the answer has no keys"):
        _encode_grant({"AccessKeyId": "a", "Expiration": "tomorrow"}, "cannot get keys", Redactor())


async def _answer() -> LoopbackAnswer:
    return LoopbackAnswer(b"credentials")


async def _send(loopback: Loopback, head: bytes) -> bytes:
    port = urlsplit(loopback.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("X-Secret: {secret}", b"200 OK"),
        ("X-Secret: {secret}x", b"403 Forbidden"),
        ("Authorization: {secret}", b"403 Forbidden"),
    ],
    ids=["secret", "another secret", "another header"],
)
async def test_only_who_knows_the_secret_is_served(header: str, status: bytes) -> None:
    async with serve_on_loopback("x-secret", _answer) as loopback:
        head = f"POST / HTTP/1.1\r\n{header.format(secret=loopback.secret)}\r\nContent-Length: 4\r\n\r\nbody"
        received = await _send(loopback, head.encode())
    assert received.split(b"\r\n")[0] == b"HTTP/1.1 " + status
    assert received.endswith(b"\r\n\r\ncredentials") == (status == b"200 OK")


async def test_what_is_no_request_gets_no_answer() -> None:
    async with serve_on_loopback("x-secret", _answer) as loopback:
        assert await _send(loopback, b"hello\r\n\r\n") == b""


async def test_an_answer_that_is_still_awaited_ends_with_the_service() -> None:
    asked = asyncio.Event()

    async def never() -> LoopbackAnswer:
        asked.set()
        await asyncio.Event().wait()
        return LoopbackAnswer(b"", HTTPStatus.OK)

    async with serve_on_loopback("x-secret", never) as loopback:
        head = f"GET / HTTP/1.1\r\nX-Secret: {loopback.secret}\r\n\r\n"
        sending = asyncio.get_running_loop().create_task(_send(loopback, head.encode()))
        await asked.wait()
    assert await sending == b""
