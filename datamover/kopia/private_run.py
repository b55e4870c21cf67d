"""One run of kopia over a volume that a tenant may control: its secrets, its own files, and its bounds.

Nothing that kopia could open by path meanwhile contains a secret. Password, configuration with the keys in it, and a
credentials file of Google are passed through named pipes: each has its name only until kopia opens it, hence before
kopia has read the secret, and kopia walks a volume only after it has read all of them. A file with a token, which it
would read again later, is replaced (`datamover.storage.token_files`).
Source: kopia 0.23.1, cli/config.go (openRepository), cli/password.go, internal/passwordpersist/passwordpersist_file.go,
repo/open.go (the configuration is read once), repo/blob/s3/s3_options.go, repo/blob/gcs/gcs_options.go;
cloud.google.com/go/storage 1.62, NewClient in storage.go (as is the credentials file).
"""

import json
import os
import shutil
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from core.clock import SystemClock
from core.errors import DataPathError, KopiaError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.runtime.cancellation import call_in_thread, run_in_background
from datamover.runtime.confinement import Bounds, Confinement, Means, confine
from datamover.runtime.work_dir import opened
from datamover.storage.providers import SECRET_VARIABLES
from datamover.storage.s3 import environment_keys
from datamover.storage.token_files import azure_token_file, replace_token_files

_PASSWORD: Final = "KOPIA_PASSWORD"  # noqa: S105 - the name of a variable
_CONFIG: Final = "repository.config"
_PASSWORD_FILE: Final = f"{_CONFIG}.kopia-password"
_AUTHORITIES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True)
class VolumeAccess:
    """What kopia may do to a volume, if it opens one; `in_use`: a workload pod may change it meanwhile."""

    path: Path | None = None
    writable: bool = False
    in_use: bool = False


@dataclass(frozen=True)
class PrivateRun:
    """The environment of the run, without secrets, the directory of its own files, and its confinement, if any."""

    environment: Mapping[str, str]
    home: Path
    confinement: Confinement | None


@asynccontextmanager
async def open_private_run(
    program: str, environment: Mapping[str, str], access: VolumeAccess, means: Means, *, redactor: Redactor
) -> AsyncIterator[PrivateRun]:
    """Prepare one run of `program`, which must read its password and then its configuration.

    `environment` has the secrets. `redactor` learns the ones that replace token files.

    Raises:
        DataPathError: the program does not exist, or it cannot be confined.
        KopiaError: there is no configuration.
        RepositoryError: the identity was not granted what replaces its token file.
    """
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise DataPathError(f"cannot start {program}: No such file or directory")
    in_place = access.path.parent if access.path and means.in_place else None
    with ExitStack() as stack:
        own = TemporaryDirectory(prefix="kopia-run-", dir=in_place or environment["HOME"])
        home = Path(stack.enter_context(own))
        config = _read_config(environment)
        cache = _place_cache(config, home, (in_place or home) if means.in_place else None)
        replacing = replace_token_files(
            config["storage"],
            environment,
            redactor=redactor,
            clock=SystemClock(),
            # A tenant who controls the volume could have it read through a link at any moment; a jail lacks it.
            keeps_azure=not access.in_use and not means.in_place,
        )
        async with replacing as replacement:
            config["storage"]["config"] = replacement.config
            pipes = {
                home / _PASSWORD_FILE: b64encode(os.fsencode(environment[_PASSWORD])),
                home / _CONFIG: json.dumps(config).encode(),
                **{home / name: content for name, content in replacement.files.items()},
            }
            bounds = _bounds(config, environment, access=access, own=(home, cache))
            confining = confine(Path(found), bounds, means, home)
            # It opens the volume, which may hang; the caller's watchdog ends the wait.
            confinement = await call_in_thread(lambda: stack.enter_context(confining), name="confinement")
            async with _serve(pipes):
                yield PrivateRun(_without_secrets(environment, home, cache, replacement.files), home, confinement)


def _read_config(environment: Mapping[str, str]) -> JsonDict:
    """Return the configuration with the secrets that other calls take from the environment or a file."""
    path = Path(environment["KOPIA_CONFIG_PATH"])
    try:
        config: JsonDict = json.loads(path.read_bytes())
        storage = config["storage"]["config"]
        caching = config["caching"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise KopiaError(f"cannot read kopia's configuration {path.name}: it is not connected to a repository") from e
    # kopia keeps a cache directory below its configuration as a relative path.
    caching["cacheDirectory"] = str(path.parent / caching["cacheDirectory"])
    if "accessKeyID" in storage and not storage["accessKeyID"] and (keys := environment_keys(environment)):
        storage |= keys.config
    if file := storage.pop("credentialsFile", ""):
        storage["credentials"] = json.loads(Path(file).read_bytes())
    return config


def _place_cache(config: JsonDict, home: Path, root: Path | None) -> Path:
    """Return the cache directory, which exists then; `root` is the root of a jail that it must be in."""
    cache = Path(config["caching"]["cacheDirectory"])
    if root is not None and not cache.is_relative_to(root):
        cache = home / cache.name
        config["caching"]["cacheDirectory"] = str(cache)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache


def _bounds(config: JsonDict, environment: Mapping[str, str], *, access: VolumeAccess, own: tuple[Path, ...]) -> Bounds:
    storage = config["storage"]
    volume = (access.path,) if access.path else ()
    repository = (Path(storage["config"]["path"]),) if storage["type"] == "filesystem" else ()
    # A restore writes nothing to the repository, and a link in its target may lead there.
    read_only = bool(config.get("readonly"))
    token = azure_token_file(storage["config"])
    return Bounds(
        volume=access.path,
        read=(
            *(() if access.writable else volume),
            *(repository if read_only else ()),
            # The kubelet replaces a token by changing links in its directory.
            *((Path(token).parent,) if token else ()),
        ),
        write=(*(volume if access.writable else ()), *(() if read_only else repository), *own),
        # What it writes then is its cache, each file flushed by itself, and what it restores, which the mover flushes.
        flushes=not read_only,
        files=tuple(Path(environment[name]) for name in _AUTHORITIES if environment.get(name)),
    )


def _without_secrets(environment: Mapping[str, str], home: Path, cache: Path, files: Iterable[str]) -> dict[str, str]:
    secret = {*SECRET_VARIABLES, _PASSWORD}
    own = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "KOPIA_CONFIG_PATH": str(home / _CONFIG),
        "KOPIA_LOG_DIR": str(home / "logs"),
        "KOPIA_CACHE_DIRECTORY": str(cache),
        **{name: str(home / name) for name in files},
    }
    return {name: value for name, value in environment.items() if name not in secret} | own


@asynccontextmanager
async def _serve(pipes: Mapping[Path, bytes]) -> AsyncIterator[None]:
    """Write the content of each named pipe, in this order, once kopia opens it."""
    ended = threading.Event()
    for pipe in pipes:
        os.mkfifo(pipe, mode=0o600)

    def write(_: object) -> None:
        for pipe, content in pipes.items():
            # Returns when kopia has opened the other end.
            with opened(pipe, os.O_WRONLY) as fd:
                pipe.unlink()
                if ended.is_set():
                    return
                write_all(fd, content)

    with ExitStack() as stack:
        async with run_in_background(write, name="kopia-secrets"):
            try:
                yield
            finally:
                ended.set()
                for pipe in pipes:
                    # kopia did not open it: release the thread.
                    with suppress(FileNotFoundError):
                        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                        stack.callback(os.close, reader)


def write_all(fd: int, content: bytes) -> None:
    """Write the content to kopia, which may have ended before it has read all of it: its answer says why."""
    with suppress(BrokenPipeError):
        while content:
            content = content[os.write(fd, content) :]
