"""What kopia gets for a run over a volume, and what it can open meanwhile."""

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.errors import AgentError, DataPathError, KopiaError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.kopia.private_run import VolumeAccess, open_private_run
from datamover.runtime import confinement
from datamover.runtime.confinement import Bounds, Means
from tests.datamover.support.confining import use_means
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube

_MEANS = Means(abi=1)
_open = partial(open_private_run, redactor=Redactor())
_S3: JsonDict = {"type": "s3", "config": {"bucket": "b", "accessKeyID": "", "secretAccessKey": "", "sessionToken": ""}}
_PASSWORD = b"secret of kopia, as random bytes: \xff"
_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret of S3", "AWS_SESSION_TOKEN": "token of S3"}


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[Bounds]:
    """The bounds of each run, which are not enforced."""
    found: list[Bounds] = []

    def confine(program: Path, bounds: Bounds, means: Means, home: Path) -> Any:
        found.append(bounds)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        return confinement.confine(program, bounds, Means(), home)

    monkeypatch.setattr("datamover.kopia.private_run.confine", confine)
    return found


def _environment(folder: Path, storage: JsonDict, more: Mapping[str, str]) -> dict[str, str]:
    config = {"storage": storage, "caching": {"cacheDirectory": "kopia-cache"}}
    (folder / "repository.config").write_text(json.dumps(config))
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "KOPIA_CONFIG_PATH": str(folder / "repository.config"),
        "KOPIA_PASSWORD": os.fsdecode(_PASSWORD),
        **more,
    }


async def _read(folder: Path, storage: JsonDict, more: Mapping[str, str]) -> tuple[JsonDict, Mapping[str, str]]:
    """Read password and configuration in kopia's order, and return the configuration and the environment."""
    async with _open("true", _environment(folder, storage, more), VolumeAccess(folder), _MEANS) as run:
        password = (run.home / "repository.config.kopia-password").read_bytes()
        config = json.loads(Path(run.environment["KOPIA_CONFIG_PATH"]).read_bytes())
        # Each had its name only until it was opened.
        assert list(run.home.iterdir()) == []
    assert base64.b64decode(password) == _PASSWORD
    assert not run.home.exists()
    return config, run.environment


async def test_keys_are_in_the_configuration_and_not_in_the_environment(tmp_path: Path, bounds: list[Bounds]) -> None:
    # More than a pipe holds, as a large bundle of certificate authorities is.
    authorities = "x" * 1_000_000
    config, environment = await _read(tmp_path, _S3 | {"config": _S3["config"] | {"rootCA": authorities}}, _KEYS)
    assert config["storage"]["config"]["rootCA"] == authorities
    keys = {name: config["storage"]["config"][name] for name in ("accessKeyID", "secretAccessKey", "sessionToken")}
    assert keys == {"accessKeyID": "key", "secretAccessKey": "secret of S3", "sessionToken": "token of S3"}
    assert not any("secret" in value or "token of" in value for value in environment.values())
    assert config["caching"]["cacheDirectory"] == str(tmp_path / "kopia-cache")


async def test_a_credentials_file_of_google_is_in_the_configuration(tmp_path: Path, bounds: list[Bounds]) -> None:
    (tmp_path / "gcs.json").write_text('{"type": "service_account"}')
    storage = {"type": "gcs", "config": {"bucket": "b", "credentialsFile": str(tmp_path / "gcs.json")}}
    config, _ = await _read(tmp_path, storage, {"GOOGLE_APPLICATION_CREDENTIALS": "/credentials/cloud"})
    assert config["storage"]["config"] == {"bucket": "b", "credentials": {"type": "service_account"}}
    assert not bounds[0].files


@pytest.mark.parametrize("writable", [False, True], ids=["backup", "restore"])
@pytest.mark.parametrize("read_only", [False, True], ids=["to write", "to read"])
async def test_the_bounds_are_what_is_needed(
    tmp_path: Path, bounds: list[Bounds], read_only: bool, writable: bool
) -> None:
    """Only a run that writes to no repository may leave out flushes."""
    volume, config = tmp_path / "volume", tmp_path / "repository.config"
    environment = _environment(tmp_path, _S3, {"SSL_CERT_FILE": "/work/ca.pem"})
    config.write_text(json.dumps(json.loads(config.read_text()) | ({"readonly": True} if read_only else {})))
    async with _open("true", environment, VolumeAccess(volume, writable=writable), _MEANS) as run:
        own = (run.home, tmp_path / "kopia-cache")
    read, write = ((), (volume, *own)) if writable else ((volume,), own)
    assert bounds == [Bounds(volume, read, write, (Path("/work/ca.pem"),), flushes=not read_only)]


def _azure(folder: Path, **own: str) -> JsonDict:
    """Return a storage whose identity is the token in a file."""
    file = folder / "tokens" / "token"
    file.parent.mkdir(exist_ok=True)
    file.write_text("token of the service account")
    config = {"storageAccount": "a", "container": "b", "TenantID": "t", "ClientID": "c", **own}
    config["azureFederatedTokenFile"] = str(file)
    return {"type": "azureBlob", "config": config}


@pytest.mark.parametrize(
    ("in_use", "means", "kept"),
    [(False, _MEANS, True), (True, _MEANS, False), (False, Means(missing="x", chroot=True), False)],
)
async def test_a_token_file_of_azure_can_be_read_unless_a_pod_uses_the_volume(
    tmp_path: Path, bounds: list[Bounds], monkeypatch: pytest.MonkeyPatch, in_use: bool, means: Means, kept: bool
) -> None:
    """Else kopia gets a signature: its jail has no such file."""

    async def fetch_signature(*_: object) -> str:
        return "sig=s"

    monkeypatch.setattr("datamover.storage.azure_keys.fetch_signature", fetch_signature)
    environment = _environment(tmp_path, _azure(tmp_path), {})
    access = VolumeAccess(tmp_path / "v", in_use=in_use)
    async with _open("true", environment, access, means) as run:
        (run.home / "repository.config.kopia-password").read_bytes()
        config = json.loads((run.home / "repository.config").read_bytes())["storage"]["config"]
    assert bounds[0].read == (tmp_path / "v", *((tmp_path / "tokens",) if kept else ()))
    assert (config.get("sasToken"), bool(config["azureFederatedTokenFile"])) == (None if kept else "sig=s", kept)
    # Beside a key it is no obstacle.
    environment = _environment(tmp_path, _azure(tmp_path, storageKey="k"), {})
    async with _open("true", environment, VolumeAccess(tmp_path, in_use=True), _MEANS):
        assert bounds[-1].read == (tmp_path,)


async def test_what_replaces_token_files_can_be_read_once(tmp_path: Path, bounds: list[Bounds]) -> None:
    """The token itself cannot be read at all."""
    token, file = tmp_path / "tokens" / "token", tmp_path / "google.json"
    token.parent.mkdir()
    token.write_text("token of the service account")
    file.write_text(json.dumps({"type": "external_account", "credential_source": {"file": str(token)}}))
    variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    environment = _environment(tmp_path, {"type": "gcs", "config": {"bucket": "b"}}, variables)
    async with _open("true", environment, VolumeAccess(tmp_path / "v", in_use=True), _MEANS) as run:
        for name in ("repository.config.kopia-password", "repository.config"):
            (run.home / name).read_bytes()
        document = json.loads(Path(run.environment["GOOGLE_APPLICATION_CREDENTIALS"]).read_bytes())
        assert list(run.home.iterdir()) == []
        assert bounds[0].read == (tmp_path / "v",)
    assert "file" not in document["credential_source"]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        ("no-such-program", DataPathError, "^cannot start no-such-program: No such file or directory$"),
        ("true", KopiaError, "it is not connected to a repository"),
    ],
)
async def test_what_is_missing_is_an_error(tmp_path: Path, program: str, error: type[AgentError], message: str) -> None:
    environment = _environment(tmp_path, _S3, {})
    (tmp_path / "repository.config").write_text("{}")
    with pytest.raises(error, match=message):
        async with _open(program, environment, VolumeAccess(), _MEANS):
            pass


@pytest.mark.processes
async def test_a_pod_with_the_capability_to_chroot_alone_is_confined_to_its_scratch_volume(
    s3: S3Server, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_means("chroot", monkeypatch)
    (scratch := tmp_path / "scratch").mkdir()
    volume = tree.rename(scratch / "volume")
    monkeypatch.setenv("VELERO_SCRATCH_DIR", str(scratch))
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, s3.make_bucket("jail"))
    await pod.create_repository()
    before = describe_tree(volume)
    await pod.transfer("DataUpload", volume)
    volume.rename(tmp_path / "original")
    volume.mkdir()
    await pod.transfer("DataDownload", volume, snapshotID=pod.result["snapshotID"])
    assert describe_tree(volume) == before
    assert {path.name for path in scratch.iterdir()} <= {"volume", "kopia-cache"}


@pytest.mark.processes
@pytest.mark.cause("not-confined")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "cannot confine kopia to its volume: no Landlock (Operation not permitted), and no chroot: permit"),
        ("chroot", "cannot confine kopia: {folder}/backups/kopia/app is not in {folder}/scratch, which would be"),
    ],
)
async def test_an_unconfined_pod_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    use_means(name, monkeypatch)
    volume = tmp_path / "scratch" / "volume"
    volume.mkdir(parents=True)
    (tmp_path / "backups").mkdir()
    pod = MoverPod(FakeKube(), tmp_path)
    await pod.create_repository()
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", volume) == DataPathError.exit_code
    assert text.format(folder=tmp_path) in pod.message


async def test_a_volume_that_hangs_does_not_block_the_mover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    @contextmanager
    def confine(*_: object) -> Iterator[None]:
        released.wait(60)
        yield

    monkeypatch.setattr("datamover.kopia.private_run.confine", confine)
    environment = _environment(tmp_path, _S3, {})
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), _open("true", environment, VolumeAccess(tmp_path), _MEANS):
                raise AssertionError
    finally:
        released.set()
